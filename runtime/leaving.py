"""Rows that leave a side or are written anew: chosen ones, those whose time is up, the newest, merged ones."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from runtime.side import Runs, Side, joined


def keep(side: Side, index: Tensor) -> None:
    """Keep rows index [B, H, m] (ascending); the tail's rows must be among them while encoded rows are left."""
    encoded = int((index[0, 0] < side.encoded_rows).sum()) if side.encoded_rows else 0
    if encoded < side.encoded_rows:
        for buffer in side.encoded.values():
            buffer.keep(index[:, :, :encoded])
    later = index[:, :, encoded:] - side.encoded_rows
    if side.rest is not None and later.shape[2] < side.rest.rows:
        side.rest.keep(later)
    side.encoded_rows = encoded
    side.blocks = [encoded] if encoded else []


def whole_units(ranges: Runs, unit: int, rows: int) -> Runs:
    """Ranges of `rows` appended rows widened to whole units of rows that are, or will be, encoded together."""
    found: Runs = []
    done = 0
    for start, stop in ranges:
        first = max(start // unit * unit, done)
        done = max(min(-(-stop // unit) * unit, rows), first)
        found.append((first, done))
    return joined(found)


def overlap(a: Runs, b: Runs) -> Runs:
    """What two lists of runs have in common."""
    return joined([(max(x, p), min(y, q)) for x, y in a for p, q in b if max(x, p) < min(y, q)])


def places(held: Runs, wanted: Runs) -> Runs:
    """Where the wanted runs, all of them held, stand among the rows held."""
    found: Runs = []
    at = 0
    for start, stop in held:
        for low, high in overlap([(start, stop)], wanted):
            found.append((at + low - start, at + high - start))
        at += stop - start
    return joined(found)


def expire(side: Side, ranges: Runs) -> None:
    """Drop by position: keep rows of `ranges` (counted over all rows appended) and what shares a unit with them."""
    held = [(0, side.appended)] if side.runs is None else side.runs
    kept = overlap(held, whole_units(ranges, side.unit if side.ready else 1, side.appended))
    if kept == held:
        return
    runs = places(held, kept)
    edge = side.encoded_rows
    _keep_encoded(side, overlap(runs, [(0, edge)]))
    if side.rest is not None:
        later = [(start - edge, stop - edge) for start, stop in overlap(runs, [(edge, edge + side.rest.rows)])]
        side.rest.keep_runs(later)
    side.runs = kept


def _keep_encoded(side: Side, runs: Runs) -> None:
    """Keep runs of encoded rows, which are whole units; blocks stay while one of their rows does."""
    count = sum(stop - start for start, stop in runs)
    if count == side.encoded_rows:
        return
    sizes = _left_of_blocks(side.blocks, runs)
    alive = [i for i, size in enumerate(sizes) if size]
    for name, buffer in side.encoded.items():
        per = side.rows_per(name)
        if per:
            mine = overlap([(start // per, -(-stop // per)) for start, stop in runs], [(0, buffer.rows)])
        else:
            mine = _rows_of_blocks(alive, _each(side, name, buffer.rows), buffer.rows)
        buffer.keep_runs(mine)
    if side.maps_held is not None:
        side.maps_held.keep_runs(_rows_of_blocks(alive, side.maps_held.shape[3], side.maps_held.rows))
    side.encoded_rows = count
    side.blocks = [size for size in sizes if size]


def _each(side: Side, name: str, rows: int) -> int:
    """Rows of a block buffer for one block: a correction may cover the first block alone."""
    fix = next((f for f in side.fixes if name.startswith(f.part_name + ".")), None)
    covered = len(side.blocks) if fix is None or side.step >= fix.part.least_block_rows else 1
    return rows // max(covered, 1)


def _rows_of_blocks(alive: list[int], each: int, rows: int) -> Runs:
    return overlap(joined([(i * each, (i + 1) * each) for i in alive]), [(0, rows)])


def _left_of_blocks(blocks: list[int], runs: Runs) -> list[int]:
    """Rows of each block that lie in the runs."""
    found, at = [], 0
    for size in blocks:
        found.append(sum(max(0, min(stop, at + size) - max(start, at)) for start, stop in runs))
        at += size
    return found


def visible(side: Side, ranges: Runs) -> Tensor | None:
    """Which held rows lie in `ranges`, int64 [m]; None where all do. Dead rows wait for the rest of their unit."""
    held = [(0, side.appended)] if side.runs is None else side.runs
    runs = places(held, overlap(held, ranges))
    if sum(stop - start for start, stop in runs) == side.rows:
        return None
    device = side.setting.device
    return torch.cat([torch.arange(a, b, device=device) for a, b in runs or [(0, 0)]])


def crop(side: Side, rows: int, undone: bool = False) -> None:
    """Forget the newest rows: from the tail first, then from encoded rows, a cut unit going back to the tail.

    undone: nothing was dropped since these rows came. Else KvsimError where a row that left would have to come back.
    """
    if not undone and side.runs is not None and side.runs != [(0, side.appended)]:
        raise KvsimError("crop: rows were dropped by position; a cache cannot be cropped back across dropped rows")
    left = side.appended - rows
    if left <= 0:
        side.clear()
        return
    if side.rest is not None and rows:
        gone = min(rows, side.rest.rows)
        side.rest.truncate(side.rest.rows - gone)
        rows -= gone
    if rows:
        _crop_encoded(side, rows)
    side.appended = left
    side.runs = None if side.runs is None else overlap(side.runs, [(0, left)])
    side.prompt_rows = None if side.prompt_rows is None else min(side.prompt_rows, left)


def _crop_encoded(side: Side, rows: int) -> None:
    left = side.encoded_rows - rows
    whole = left // side.unit * side.unit
    rest = None
    if left > whole:
        stop = min(whole + side.unit, side.encoded_rows)
        rest = side.decode(side.slice(whole, stop), side.block_of()[whole:stop])[:, :, : left - whole]
    _keep_encoded(side, [(0, whole)] if whole else [])
    side.coded = whole
    if rest is not None:
        assert side.tail is not None
        side.tail.append(rest)


def rewrite(side: Side, at: Tensor, x: Tensor) -> None:
    """Row at[b, h, i] becomes x[b, h, i]; -1 writes nothing. Each new row is encoded once, where it stands."""
    if not at.shape[2]:
        return
    if side.basis is not None and side.ready:
        x = side.project(x)
    at = at[:, : x.shape[1]]
    if side.rest is not None:
        side.rest.put(at - side.encoded_rows, x)
    if side.encoded_rows:
        inside = torch.where(at < side.encoded_rows, at, -1)
        for name, buffer in side.packed(x).items():
            side.encoded[name].put(inside, buffer)
