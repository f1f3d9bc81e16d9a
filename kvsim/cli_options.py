"""What questions on the command line have in common: sizes, the options of a case, limits; how they become types."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import click

from kvsim.errors import KvsimError

if TYPE_CHECKING:
    from kvsim.evidence import Evidence
    from kvsim.hardware import HardwareProfile
    from kvsim.model import ModelSpec
    from kvsim.plan import Limits
    from kvsim.record import Case

ANSWERED, NOTHING_FITS, WRONG_QUESTION = 0, 1, 2


class Count(click.ParamType[int]):
    """A whole number such as 4096 or 128k."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Text to int; what is no text has been converted."""
        from kvsim.sizes import parse_count

        return parse_count(value, _named(param)) if isinstance(value, str) else value


class Counts(click.ParamType[tuple[int, ...]]):
    """A comma list of counts and ranges such as 4k:128k:x2."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Text to a tuple of ints."""
        from kvsim.sizes import parse_counts

        return parse_counts(value, _named(param)) if isinstance(value, str) else value


class Bytes(click.ParamType[int]):
    """A byte count such as 512MiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Text to int."""
        from kvsim.sizes import parse_bytes

        return parse_bytes(value, _named(param)) if isinstance(value, str) else value


def _named(param: click.Parameter | None) -> str:
    return param.opts[0] if param is not None and param.opts else "a size"


Command = Callable[..., None]

model_option = click.option(
    "--model", required=True, metavar="M", help="A name of `kvsim models`, a config.json or its folder, a hub id."
)
device_option = click.option(
    "--device", required=True, metavar="D", help="A name of `kvsim devices`, or the path of a profile."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")

_CASE = (
    model_option,
    device_option,
    click.option("--devices", type=int, default=1, metavar="N", help="How many of the device, tensor parallel.  [1]"),
    click.option(
        "--weights", default="", metavar="FORMAT", help="bf16, fp8, int8, int4, q4_k_m ...  [the model's dtype]"
    ),
    click.option("--kv-dtype", default="", metavar="DTYPE", help="Full precision of the cache.  [the model's dtype]"),
    click.option("--reserve", type=Bytes(), metavar="BYTES", help="Memory kept for the runtime.  [by kind of device]"),
    click.option(
        "--kernel", metavar="FAMILY", help="Attention kernels whose coefficients to use.  [the device's default]"
    ),
    click.option(
        "--what-if", metavar="KEY=RATE,..", help="Hardware to add: decompress=4TB/s,mixed=2PFLOP/s,near_memory=.."
    ),
)
_LIMITS = (
    click.option("--max-ttft", type=float, metavar="MS", help="First token within these milliseconds."),
    click.option("--max-tpot", type=float, metavar="MS", help="A decode step within these milliseconds."),
    click.option("--min-context", type=Count(), metavar="TOKENS", help="Longest context at least this."),
)


_QUALITY = (
    click.option("--max-kl", type=float, metavar="NATS", help="At most this KL divergence a token, as measured."),
    click.option("--min-top1", type=float, metavar="SHARE", help="At least this share of likeliest tokens unchanged."),
    click.option("--max-ppl", type=float, metavar="RATIO", help="Perplexity at most this times the full cache's."),
    click.option("--require-evidence", is_flag=True, help="Only methods that were measured on this very model."),
    click.option("--evidence", metavar="FILE", help="What `kvsim quality` measured.  [your own, then what is shipped]"),
)


@dataclass(frozen=True)
class Asked:
    """The options that fit, predict and sweep share, as typed."""

    model: str
    device: str
    devices: int
    weights: str
    kv_dtype: str
    reserve: int | None
    kernel: str | None
    what_if: str | None = None

    def load(self) -> tuple[ModelSpec, HardwareProfile]:
        """The model and the device, with what is to be added to it; KvsimError where one is unknown."""
        from kvsim.configs import load_model
        from kvsim.hardware import load_device

        model, device = load_model(self.model), load_device(self.device)
        if self.what_if is None:
            return model, device
        from kvsim.whatif import what_if

        return model, what_if(device, self.what_if)

    def case(self, method: str, batch: int, prompt: int, new: int) -> Case:
        """One question for predict."""
        from kvsim.method import parse_method
        from kvsim.record import Case
        from kvsim.workload import Workload

        model, device = self.load()
        return Case(
            model,
            device,
            parse_method(method),
            Workload(batch, prompt, new),
            self.weights,
            self.kv_dtype,
            self.devices,
            self.reserve,
            self.kernel,
        )


@dataclass(frozen=True)
class AskedLimits:
    """What an answer must keep to, as typed."""

    max_ttft: float | None
    max_tpot: float | None
    min_context: int | None

    def limits(self) -> Limits:
        """The type that `fit` takes; KvsimError for what is no positive number."""
        from kvsim.plan import Limits

        return Limits(self.max_ttft, self.max_tpot, self.min_context)


@dataclass(frozen=True)
class AskedQuality:
    """Limits on what a method may lose, and the evidence to judge it by, as typed."""

    max_kl: float | None
    min_top1: float | None
    max_ppl: float | None
    require_evidence: bool
    evidence: str | None

    def added(self, limits: Limits) -> Limits:
        """The same limits and these."""
        return replace(
            limits,
            max_kl=self.max_kl,
            min_top1=self.min_top1,
            max_ppl=self.max_ppl,
            require_evidence=self.require_evidence,
        )

    def rows(self) -> tuple[Evidence, ...]:
        """Measured rows, the user's own first."""
        from kvsim.evidence import gathered

        return gathered(self.evidence)


def asks(command: Command) -> Command:
    """Give a command the options of a case, handed to it as one `Asked`."""
    return _bundled(command, Asked, "asked", _CASE)


def limited(command: Command) -> Command:
    """Give a command the limits, handed to it as one `AskedLimits`."""
    return _bundled(command, AskedLimits, "limits", _LIMITS)


def judged(command: Command) -> Command:
    """Give a command limits on quality, handed to it as one `AskedQuality`."""
    return _bundled(command, AskedQuality, "quality", _QUALITY)


def _bundled(command: Command, kind: type, name: str, options: tuple[Callable[[Command], Command], ...]) -> Command:
    @functools.wraps(command)
    def run(**given: Any) -> None:
        bundle = kind(**{f.name: given.pop(f.name) for f in fields(kind)})
        command(**{name: bundle}, **given)

    made: Command = run
    for option in reversed(options):
        made = option(made)
    return made


def refuse_repeats(command: click.Command, args: list[str]) -> None:
    """KvsimError where an option that takes one value stands on the line twice: click would drop the first unsaid."""
    quiet = click.Context(command, resilient_parsing=True, **command.context_settings)
    seen: set[str] = set()
    for param in command.make_parser(quiet).parse_args(list(args))[2]:
        if isinstance(param, click.Option) and not param.multiple and not param.is_flag and param.opts[0] in seen:
            raise KvsimError(f"{param.opts[0]} is given twice; give it once, a list split by commas")
        seen.add(param.opts[0])


def print_json(answer: Any) -> None:
    """One JSON document on standard output; a figure that is not finite has no place in it."""
    try:
        text = json.dumps(answer, allow_nan=False, indent=1)
    except ValueError:
        raise KvsimError("the answer holds a figure that is not finite; ask with smaller sizes") from None
    click.echo(text)


def leave(status: int) -> None:
    """End the command with this exit status."""
    if status:
        click.get_current_context().exit(status)
