"""Tables of the command line."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from api.cli.live import STYLES
from api.dashboard.formats import STATE_WORDS, count, duration, milliseconds, percent
from onboarding.architecture import BlockRoles

KIND_STYLES = (
    "black on bright_cyan",
    "black on yellow",
    "white on dark_green",
    "black on magenta",
    "black on bright_yellow",
)
STRIP_WIDTH = 32
LONGEST_NAME = 36


def plain(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def jobs_table(jobs: list[dict[str, Any]]) -> Table:
    """Jobs, one a row."""
    table = plain("job", "model", "state", "profile", "elapsed", "submitted", right=("elapsed",))
    for column in table.columns:
        column.no_wrap = column.header != "model"  # an id is for copying
    for job in jobs:
        word = STATE_WORDS.get(job["state"], job["state"])
        when = job["created_at"][5:16].replace("T", " ")
        name = job["name"] if len(job["name"]) <= LONGEST_NAME else job["name"][: LONGEST_NAME - 1] + "…"
        cells = (job["id"], name, "", job["profile"], duration(job["elapsed_s"]), when)
        texts = [Text(cell) for cell in cells]
        texts[2] = Text(word, style=STYLES.get(word, ""))
        table.add_row(*texts)
    return table


def strip(architecture: dict[str, Any]) -> Text:
    """The layers in order, coloured by kind, lettered so that colour is never the only sign."""
    letters = list(dict.fromkeys(architecture["strip"]))
    text = Text()
    for index, letter in enumerate(architecture["strip"]):
        if index and index % STRIP_WIDTH == 0:
            text.append("\n")
        text.append(f" {letter} ", style=KIND_STYLES[letters.index(letter) % len(KIND_STYLES)])
    return text


def blocks_table(architecture: dict[str, Any]) -> Table:
    """Block kinds with their shares."""
    blocks = architecture["blocks"]
    flops = sum(b["flops"] * len(b["layers"]) for b in blocks) or 1.0
    moved = sum(b["bytes_moved"] * len(b["layers"]) for b in blocks) or 1.0
    right = ("blocks", "parameters", "active", "FLOPs", "bytes")
    table = plain("kind", "mixer", "feed-forward", *right, "marks", right=right)
    for b in blocks:
        n = len(b["layers"])
        marks = [("state along the sequence", "sequence_dependent"), ("sparse access", "sparse_memory_access")]
        cells = (
            b["letter"],
            b["mixer"],
            b["feed_forward"],
            str(n),
            count(b["parameters"]),
            count(b["active_parameters"]),
            percent(b["flops"] * n / flops),
            percent(b["bytes_moved"] * n / moved),
            ", ".join(word for word, name in marks if b[name]),
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def roles_table(architecture: dict[str, Any]) -> Table:
    """What each block kind is made of, as its reduced twin showed."""
    table = plain("kind", "part", "what it is")
    for block in architecture["blocks"]:
        if block.get("roles"):
            for part, words in BlockRoles.model_validate(block["roles"]).lines():
                table.add_row(Text(block["letter"]), Text(part), Text(words))
    return table


def proofs_line(architecture: dict[str, Any]) -> Text:
    """How many claims about roles were proven on the twin, and which were not."""
    proofs = architecture.get("proofs") or []
    missing = [p for p in proofs if not p["proven"]]
    text = Text(f"{len(proofs)} claims about roles, {len(proofs) - len(missing)} proven on the reduced twin")
    for proof in missing:
        text.append(f"\nunproven  {proof['part']}: {proof['claim']} ({proof['reason'][:160]})")
    return text


def gaps_table(gaps: dict[str, Any]) -> Table:
    """Gaps, largest expected gain on the whole step first."""
    table = plain(
        "gap", "share", "gain", "now", "floor", "bound", "provider today", right=("share", "gain", "now", "floor")
    )
    rows = sorted((row for row in gaps["rows"] if row["gap"]), key=lambda row: -row["gain"])
    for row in rows:
        times = milliseconds(row["provider_ms"]), milliseconds(row["floor_ms"])
        name = row["name"] if row["digest"] else f"{row['name']} (no template family)"
        cells = (name, percent(row["share_time"]), percent(row["gain"]), *times, row["bound"], row["provider"])
        table.add_row(*(Text(cell) for cell in cells))
    return table


def coverage_table(gaps: dict[str, Any]) -> Table:
    """Who serves the step, largest share first."""
    table = plain("provider", "share of the step", "operators", "fast", right=("share of the step", "operators"))
    for row in gaps["coverage"]:
        table.add_row(
            Text(row["provider"]), percent(row["share_time"]), str(row["operators"]), "yes" if row["fast"] else "no"
        )
    return table


def parse_view(outcome: dict[str, Any]) -> RenderableType:
    """Strip, blocks, gaps, what is new, warnings."""
    a = outcome["parse"]["architecture"]
    census = a["census"]
    head = Text.assemble(
        (a["name"], "bold"),
        f"  {a['class_name']}  {a['num_layers']} layers  {count(census['total'])} parameters, "
        f"{count(census['active'])} active  {'tied' if census['tied_embeddings'] else 'untied'} embeddings",
    )
    roles = plain("role", "parameters", "share", right=("parameters", "share"))
    for role, n in sorted(census["by_role"].items(), key=lambda item: -item[1]):
        roles.add_row(Text(role), count(n), percent(n / census["total"]))
    for part, n in census["not_built"].items():
        roles.add_row(Text(f"{part}, in the checkpoint only"), count(n), percent(n / census["total"]))
    parts: list[RenderableType] = [head, "", strip(a), "", blocks_table(a), "", roles]
    if a.get("proofs"):
        parts += ["", roles_table(a), proofs_line(a)]
    if outcome["gaps"] is not None:
        gaps = outcome["gaps"]
        where = f"projection for {gaps['target']} at {gaps['sequence_length']} tokens"
        parts += [
            "",
            gaps_table(gaps) if any(row["gap"] for row in gaps["rows"]) else Text("no gaps"),
            Text(where, style="dim"),
        ]
    if outcome["gaps"] is not None and outcome["gaps"]["coverage"]:
        parts += ["", coverage_table(outcome["gaps"])]
    lines = [("new", name) for name in a["novel"]] + [("warning", line) for line in a["warnings"]]
    lines += [("partial", reason) for reason in outcome["reasons"]]
    if lines:
        parts += ["", *(Text.assemble((f"{word}  ", "yellow"), line) for word, line in lines)]
    return Group(*parts)


DIFF_STYLES = {"new": "bold green", "changed": "yellow", "gone": "red", "same": "dim"}


def diff_view(found: dict[str, Any], *, everything: bool) -> RenderableType:
    """Sizes, then features and operators that differ (all of them if asked)."""
    before, after = found["before"], found["after"]
    sizes = plain("size", before, after, "ratio", right=(before, after, "ratio"))
    for row in found["sizes"]:
        ratio = f"{row['after'] / row['before']:.3g}" if row["before"] else ""
        sizes.add_row(row["name"], count(row["before"]), count(row["after"]), ratio)
    parts: list[RenderableType] = [
        Text.assemble((after, "bold"), " against ", (before, "bold"), f": {percent(found['likeness'])} alike"),
        "",
        sizes,
    ]
    for title in ("features", "operators"):
        table = plain("", title, before, after)
        rows = [row for row in found[title] if everything or row["state"] != "same"]
        for row in rows:
            table.add_row(
                Text(row["state"], style=DIFF_STYLES[row["state"]]),
                Text(row["name"]),
                Text(row["before"] or ("yes" if row["state"] != "new" else "")),
                Text(row["after"] or ("yes" if row["state"] != "gone" else "")),
            )
        parts += ["", table if rows else Text(f"the same {title}", style="dim")]
    return Group(*parts)


def doctor_table(checks: list[dict[str, Any]]) -> Table:
    """What this machine has, and what that allows."""
    table = plain("", "what", "found", "allows")
    for check in checks:
        mark = Text("ok", style="green") if check["ok"] else Text("no", style="yellow")
        table.add_row(mark, Text(check["name"]), Text(check["detail"]), Text(check["allows"]))
    return table
