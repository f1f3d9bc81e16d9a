"""The commands methods, devices, models and show: what is known, with sources."""

from __future__ import annotations

from typing import Any

import click

from kvsim.cli_options import json_option, print_json

ROLES = {
    "format": "number formats",
    "correction": "corrections of a format",
    "basis": "bases",
    "tokens": "token policies",
}


@click.command("methods")
@json_option
def methods_command(as_json: bool) -> None:
    """List the parts of methods, and presets."""
    from kvsim.knowledge import method_rows, preset_rows

    rows = [*method_rows(), *preset_rows()]
    if as_json:
        print_json(rows)
        return
    from kvsim.report import console
    from kvsim.report_lists import print_methods

    print_methods(console(), rows, {**ROLES, "preset": "presets"})


@click.command("devices")
@json_option
def devices_command(as_json: bool) -> None:
    """List the shipped devices."""
    from kvsim.knowledge import device_rows

    rows = device_rows()
    if as_json:
        print_json(rows)
        return
    from kvsim.report import console
    from kvsim.report_lists import print_devices

    print_devices(console(), rows)


@click.command("models")
@json_option
def models_command(as_json: bool) -> None:
    """List the shipped models."""
    from kvsim.knowledge import model_rows

    rows = model_rows()
    if as_json:
        print_json(rows)
        return
    from kvsim.report import console
    from kvsim.report_lists import print_models

    print_models(console(), rows)


@click.command("show")
@click.argument("name", nargs=-1, required=True)
@json_option
def show_command(name: tuple[str, ...], as_json: bool) -> None:
    """Tell all of one method, device or model, with sources."""
    from kvsim.knowledge import known

    found: dict[str, Any] = known(" ".join(name))
    if as_json:
        print_json(found)
        return
    from kvsim.report import console
    from kvsim.report_lists import print_known

    print_known(console(), found)


COMMANDS = (methods_command, devices_command, models_command, show_command)
