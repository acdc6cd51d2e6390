"""The report as one HTML page that needs nothing else: style and plots are inside, and it opens no connection."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from trainer.lifecycle.plots import Bar, Node, Series, columns, lineage, lines, timeline

# Read at once: that it is missing must not come out at the end of a run.
STYLE = (Path(__file__).parents[1] / "assets" / "report.css").read_text()

Report = Mapping[str, Any]


def render(report: Report) -> str:
    """The page of a report, as :func:`trainer.lifecycle.report.make_report` makes it, with or without its archive."""
    parts = [
        _head(report),
        _roots(report),
        _plots(report),
        _loss_of_host(report),
        _staging(report),
        _requests(report),
        _evaluation(report),
        _groups(report),
        _state(report),
        _end(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Lifecycle of {escape(report['profile'])}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _head(report: Report) -> str:
    plan, equal = report["plan"], _equal(report)
    badge = '<span class="badge">equal bit for bit</span>' if equal else '<span class="badge bad">different</span>'
    middle, drill = plan["commits"][1], plan["drill"]
    return (
        f"<h1>A host lost in the middle of an update, and the same model {badge}</h1>"
        f"<p>A model of {plan['parameters']:,} parameters was trained by {len(report['ownership'])} workers, none of "
        f"which held it whole. In update {drill['update']} the host of shard {drill['shard']} was lost. A third host "
        f"took over that shard from the checkpoint at step {plan['commits'][0]}; the replay to update {middle} ended "
        f"in {'the same root, losses and norms as' if equal else '<strong>another state than</strong>'} the run "
        "without a loss.</p>"
        f'<p class="soft">Profile {escape(report["profile"])}, begun {escape(report["began_at"])}, '
        f"{report['seconds']:.1f} s. Prepared identity <code>{escape(report['prepared_identity'])}</code>.</p>"
    )


def _roots(report: Report) -> str:
    early, middle, last = map(str, report["plan"]["commits"])
    roots = report["roots"]
    rows = [
        (early, "committed by the first group", roots[early]["root"]),
        (middle, "run without a loss, in a store of its own", roots[middle]["reference"]),
        (middle, "recovered on the third host", roots[middle]["recovered"]),
        (last, "continued from the recovered root", roots[last]["root"]),
    ]
    return "<h2>Roots</h2>" + _table(
        ("step", "checkpoint", "root"),
        [(step, escape(what), f"<code>{escape(root)}</code>") for step, what, root in rows],
        {0},
    )


def _plots(report: Report) -> str:
    updates, drill = report["updates"], report["plan"]["drill"]
    curve = {name: [(one["update"], one["loss"]) for one in updates[name]] for name in updates}
    loss = lines(
        "Training loss: the replay lies on the reference",
        [
            Series("without a loss", "reference", curve["reference"]),
            Series("replay after the loss", "replay", curve["replay"]),
            Series("continued", "continued", curve["continued"]),
        ],
        "update",
        "nats per weighted token",
        {drill["update"]: "host lost here"},
    )
    sent = [(one["update"], float(one["sent_bytes"])) for name in ("reference", "continued") for one in updates[name]]
    bytes_sent = columns("Boundary tensors sent by shard 0, by update", sent, "update", "bytes")
    return f"<h2>What happened</h2>{loss}{_timeline(report)}{bytes_sent}{_lineage(report)}"


def _timeline(report: Report) -> str:
    lost = report["loss_of_host"]
    bars = [Bar(one["name"], one["began"], one["ended"], "phase") for one in report["phases"]]
    for group in report["groups"]:
        for shard, host in enumerate(group["hosts"]):
            is_lost = host == lost["host"] and group["began"] <= lost["at"] <= group["ended"]
            label = f"group {group['generation']} ({group['purpose']}), shard {shard}"
            end = lost["at"] if is_lost else group["ended"]
            bars.append(Bar(host, group["began"], end, "lost" if is_lost else "group", label))
    return timeline("Timeline", bars, {lost["at"]: f"{lost['host']} lost"})


def _lineage(report: Report) -> str:
    early, middle, last = map(str, report["plan"]["commits"])
    roots = report["roots"]
    nodes = [
        Node("start", "no checkpoint", 0, 0),
        Node(f"step {early}", _short(roots[early]["root"]), 1, 0),
        Node(f"step {middle}, recovered", _short(roots[middle]["recovered"]), 2, 0),
        Node(f"step {last}", _short(roots[last]["root"]), 3, 0),
        Node(f"step {middle}, reference", _short(roots[middle]["reference"]), 2, 1, "node apart"),
    ]
    edges = [(0, 1, ""), (1, 2, "replayed"), (2, 3, "parent"), (1, 4, "not interrupted")]
    return lineage("Lineage of roots", nodes, edges)


def _loss_of_host(report: Report) -> str:
    lost, plan = report["loss_of_host"], report["plan"]
    missed = f"{plan['heartbeats_missed']} heartbeats of {plan['heartbeat_seconds']} s were missed"
    how = {
        "stop": f"stopped (SIGSTOP), then killed when {missed}",
        "silent": f"taken off the network, then killed where nobody could see it; {missed}",
    }.get(lost["mode"], "killed (SIGKILL of all that ran on it)")
    signs = "; ".join(
        f"{escape(one['sign'])} (shard {one['shard']}) after {one['ms']:.1f} ms" for one in lost["evidence"]
    )
    last = ", ".join(f"shard {shard}: {number}" for shard, number in enumerate(lost["completed"]))
    rows = [
        ("host", f"{escape(lost['host'])}, process group {lost['pid']}, {how}"),
        (
            "when",
            f"update {lost['update']}, after the forward of microbatch {lost['microbatch']} on shard {lost['shard']}",
        ),
        ("noticed", f"{lost['detection_ms']:.1f} ms after: {escape(lost['detected_by'])}. Signs: {signs}"),
        ("survivor aborted", f"{lost['abort_ms']:.1f} ms later, no process left"),
        ("last completed update", last),
        ("head of the ref", f"<code>{escape(lost['head'])}</code>, so no newer root exists"),
        ("work thrown away", f"updates {', '.join(map(str, lost['discarded']))} and the unfinished {lost['update']}"),
    ]
    return "<h2>The lost host</h2>" + _table(("", ""), rows)


def _staging(report: Report) -> str:
    rows = [
        (
            escape(one["host"]),
            str(one["shard"]),
            str(one["attempt"]),
            f"{one['files']:,}",
            f"{one['bytes']:,}",
            '<span class="yes">as frozen</span>'
            if not one["refused"]
            else f'<span class="no">{escape(one["refused"])}</span>',
        )
        for one in report["stagings"]
    ]
    pulled = [
        (
            escape(one["host"]),
            str(one["shard"]),
            f"<code>{_short(one['root'])}</code>",
            f"{one['received_bytes']:,}",
            f"{one['readback_bytes']:,}",
            escape(one["method"]),
        )
        for one in report["pulled"]
    ]
    return (
        "<h2>Staging and transfers</h2>"
        f"<p>The third host was an empty folder ({len(report['empty_listing'] or [])} entries). One staging without "
        "the chat template was refused by name, on purpose, and corrected; both attempts are listed.</p>"
        + _table(("host", "shard", "attempt", "files", "bytes copied", "check"), rows, {1, 2, 3, 4})
        + "<p>Objects and documents of checkpoints that hosts fetched from the operator's store:</p>"
        + _table(("host", "shard", "root", "bytes received", "bytes read back", "read from"), pulled, {1, 3, 4})
        + "<p>Checkpoints as they were committed:</p>"
        + _table(
            ("step", "store", "root", "bytes moved", "read back after moving", "closure read after commit", "seconds"),
            [
                (
                    str(one["step"]),
                    escape(one["store"]),
                    f"<code>{_short(one['root'])}</code>",
                    f"{one['sent_bytes']:,}",
                    f"{one['readback_bytes']:,}",
                    f"{one['verified_bytes']:,}",
                    f"{one['seconds']:.2f}",
                )
                for one in report["checkpoints"]
            ],
            {0, 3, 4, 5, 6},
        )
    )


def _requests(report: Report) -> str:
    """What was asked of the operator's server; nothing for a directory, of which nothing is asked."""
    operator = report.get("operator", {})
    asked = operator.get("requests", [])
    if not asked:
        return ""
    rows = [
        (
            escape(one["phase"]),
            escape(one["party"]),
            f"{sum(one['operations'].values()):,}",
            escape(", ".join(f"{name} {count:,}" for name, count in sorted(one["operations"].items()))),
            f"{one['sent_bytes']:,}",
            f"{one['received_bytes']:,}",
        )
        for one in asked
    ]
    whole = (
        "all",
        "",
        f"{sum(sum(one['operations'].values()) for one in asked):,}",
        "",
        f"{sum(one['sent_bytes'] for one in asked):,}",
        f"{sum(one['received_bytes'] for one in asked):,}",
    )
    refused = operator["refused_write"]
    text = f"<p>The operator's store was in a {escape(operator['store'])}. Workers had no credentials; "
    text += "a host was given some for the time of its pull"
    text += f", and with them its write was refused ({escape(refused)}).</p>" if refused else ".</p>"
    head = ("phase", "by", "requests", "by operation", "bytes sent", "bytes received")
    return "<h2>Requests to the operator's server</h2>" + text + _table(head, [*rows, whole], {2, 4, 5})


def _evaluation(report: Report) -> str:
    found = report["evaluation"]
    names = [one["name"] for one in found["scores"][0]["sets"]]
    score_rows = []
    for stage in found["scores"]:
        cells = [f"update {stage['update']}"]
        for one in stage["sets"]:
            cells.append(f"{one['loss']:.5f}")
            cells.append(f"{one['correct']}/{one['generated']}" if one["generated"] else "–")
        score_rows.append(tuple(cells))
    head = ("weights", *(text for name in names for text in (f"{escape(name)} loss", "correct")))
    confidence = f"{100 * report['plan']['confidence']:g} %"
    paired = [
        (
            escape(comparison["name"]),
            escape(one["name"]),
            f"{one['loss']['mean']:+.5f}",
            f"{one['loss']['upper']:+.5f}",
            f"{one['loss']['error']:.5f}",
            f"{one['outcomes']['wins']} / {one['outcomes']['losses']} / {one['outcomes']['ties']}"
            if one["outcomes"]
            else "–",
        )
        for comparison in found["comparisons"]
        for one in comparison["sets"]
    ]
    data, verdict = report["data"], found["verdict"]
    badge = "badge" if verdict["promote"] else "badge plain"
    text = "improvement" if verdict["promote"] else "no improvement shown"
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in verdict["reasons"])
    return (
        "<h2>Evaluation</h2><p>Mean loss of the answers in nats, lower is better; greedy answers checked exactly. "
        "Scored by the shards alone, from committed roots; both workers returned the same results. By the digests of "
        f"their words, {data['trained_and_scored']} of the {data['scored']} scored documents are among the "
        f"{data['trained']} that were trained.</p>"
        + _table(head, score_rows, set(range(1, len(head))))
        + f"<p>Differences document by document, with the descriptive one-sided normal {confidence} upper bound:</p>"
        + _table(
            ("from", "set", "mean", f"{confidence} upper", "standard error", "answers won / lost / tied"),
            paired,
            {2, 3, 4, 5},
        )
        + f'<p><span class="{badge}">{text}</span> by criteria that were frozen before training:</p><ul>{reasons}</ul>'
        + _decoding(found["runs"])
        + _answers(found["answers"])
    )


def _decoding(runs: Sequence[Mapping[str, Any]]) -> str:
    again = [one["recomputed"] for one in runs]
    logits, cases = (sum(one[name] for one in again) for name in ("logits", "cases"))
    cached, computed = (", ".join(f"{one['tokens_per_second']:.0f}" for one in ones) for ones in (runs, again))
    return (
        f"<p>KV cache equals recomputation: {logits} logits of {cases} cases, computed again from the whole prefix for "
        "each token and in another company, are the same bits.</p>"
        f'<p class="soft">Answers were generated over all shards, {cached} tokens a second with the cache, {computed} '
        "without it. This says that distributed inference works, and nothing about serving.</p>"
    )


def _hosts_gone(report: Report) -> str:
    """What hosts were, and whether all of that is gone."""
    views = report["hosts"]["views"]
    rows = [
        (
            escape(one["host"]),
            escape(views[one["host"]]["address"]) if one["host"] in views else "–",
            escape(", ".join(one["namespaces"])) or "–",
            escape(one["link"]) or "–",
            "yes" if one["processes_gone"] and one["namespaces_gone"] and one["link_gone"] else "no",
        )
        for one in report["cleanup"]["hosts"]
    ]
    head = ("host", "address", "namespaces", "link", "gone")
    return f"<p>Hosts were of kind {escape(report['hosts']['kind'])}.</p>" + (_table(head, rows) if rows else "")


def _answers(answers: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for case in answers:
        cells = [f"{escape(case['set'])}<br><span class='soft'>{escape(case['document'])}</span>"]
        for stage in case["stages"]:
            style = "yes" if stage["correct"] else "no"
            cut = "" if stage["ended"] else " <span class='soft'>(cut off)</span>"
            cells.append(f'<code class="{style}">{escape(stage["text"])}</code>{cut}')
        rows.append(tuple(cells))
    head = ("case", *(f"update {stage['update']}" for stage in answers[0]["stages"])) if answers else ()
    return f"<details><summary>All {len(answers)} answers, before and after</summary>{_table(head, rows)}</details>"


def _groups(report: Report) -> str:
    rows = [
        (
            str(one["generation"]),
            escape(one["purpose"]),
            escape(", ".join(one["hosts"])),
            str(len(one["updates"])),
            f"{one['update_seconds']:.2f}",
            f"{one['ended'] - one['began']:.2f}",
            f"{one['sent_bytes']:,}",
            ", ".join(f"{peak / 2**20:,.0f}" for peak in one["peak_rss"]) or "–",
        )
        for one in report["groups"]
    ]
    head = ("group", "purpose", "hosts", "updates", "update time, s", "launched time, s", "boundary bytes", "peak MiB")
    return (
        "<h2>Launched groups</h2><p>Update time is the sum over completed updates; launched time also has starting, "
        "loading, checkpoints and waiting. They are not comparable with each other.</p>"
        + _table(head, rows, {0, 3, 4, 5, 6, 7})
    )


def _state(report: Report) -> str:
    owned = [
        (
            str(one["shard"]),
            f"layers {one['first_layer']} to {one['last_layer']}"
            + (", embedding, tied head, final norm" if one["head"] else ""),
            f"{one['tensors']:,}",
            f"{one['parameters']:,}",
            f"{one['stored_bytes']:,}",
            f"{one['training_bytes']:,}",
        )
        for one in report["ownership"]
    ]
    binding = [
        (f"<code>{escape(name)}</code>", f"<code>{escape(str(value))}</code>")
        for name, value in sorted(report["binding"].items())
    ]
    head = ("shard", "owns", "tensors", "parameters", "bytes stored", "bytes while training")
    return (
        "<h2>Who owned what</h2>"
        + _table(head, owned, {0, 2, 3, 4, 5})
        + "<details><summary>Numerical binding, equal on all workers</summary>"
        + f"{_table(('field', 'value'), binding)}</details>"
    )


def _end(report: Report) -> str:
    cleanup = report["cleanup"]
    gone = sum(one["gone"] for one in cleanup["processes"])
    folders = [
        (escape(one["name"]), f"{one['files']:,}", f"{one['bytes']:,}", "gone" if one["gone"] else "LEFT")
        for one in cleanup["folders"]
    ]
    archive = report.get("archive")
    about = ""
    if archive:
        about = "<h2>Evidence archive</h2>" + _table(
            ("", ""),
            [
                ("file", f"{escape(archive['file'])}, {archive['bytes']:,} bytes, {archive['members']} members"),
                ("SHA-256", f"<code>{escape(archive['sha256'])}</code>"),
                ("BLAKE3", f"<code>{escape(archive['blake3'])}</code>"),
                ("large objects", f"{archive['references']} by reference, {archive['reference_bytes']:,} bytes"),
                (
                    "stored",
                    f"tree <code>{escape(archive['tree'])}</code>, {archive['readback_bytes']:,} bytes read back",
                ),
            ],
        )
    return (
        f"<h2>Cleanup</h2><p>{gone} of {len(cleanup['processes'])} worker process groups are gone.</p>"
        + _hosts_gone(report)
        + _table(("folder", "files removed", "bytes", ""), folders, {1, 2})
        + about
        + "<h2>What this shows, and what not</h2><p>One planned loss of one host in the middle of one update, and a "
        "replay that ends in the same bits. It does not show discovery without a controller, availability without "
        "interruption, equal arithmetic on unequal hardware, detection of malicious workers, or survival without a "
        f"complete checkpoint. {escape(report['isolation'][:1].upper() + report['isolation'][1:])}. "
        f"The controller imported torch: {'yes' if report['controller']['torch_imported'] else 'no'}. "
        f"Cost: {escape(report['cost'])}.</p>"
    )


def _equal(report: Report) -> bool:
    middle = str(report["plan"]["commits"][1])
    return bool(report["roots"][middle]["equal"] and report["replay"]["losses_and_norms_equal"])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=n' if at in numbers else ''}>{cell}</{tag}>" for at, cell in enumerate(row))

    top = f"<tr>{cells('th', head)}</tr>" if any(head) else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}{body}</table></div>'


def _short(digest: str) -> str:
    return escape(digest.removeprefix("b3:")[:12])
