"""``ckpt plan``: what a push or a pull would do and cost, before it does anything."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import click

import ckptstore
from ckptstore import Plan, Prices, Store
from ckptstore.errors import NotFoundError, UsageError

from . import output
from .command import Session, command, shard_option
from .exits import epilog
from .other_store import other_store
from .transfer import max_age_option, print_traffic, ref_to_move, traffic_record

_PRICES = click.option(
    "--prices",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A price table; then the cost is printed as well.",
)


@click.group("plan", epilog=epilog((3, 4, 5, 6, 9)))
def COMMAND() -> None:
    """Say what a push or a pull would send, and in how many requests. Nothing is changed anywhere.

    A plan looks with the same requests as the act, which then takes just what was planned if nobody else writes
    meanwhile. Opening the stores is not in it.

    \b
    A price table is a TOML file. The figures of this example are invented;
    look up those of your provider, and say where and when:
    \b
      currency = "USD"
      as_of = "2026-01-31"
      source = "price list of the provider"
      bytes_per_gb = 1073741824
      [requests_per_1000]
      write = 0.005
      list = 0.005
      read = 0.0004
      delete = 0
      [per_gb]
      in = 0
      out = 0.09
      [per_gb_month]
      stored = 0.023
    """


@command("push", codes=(3, 4, 5, 6, 9))
@click.argument("root")
@click.argument("destination", metavar="[URL|REMOTE]", required=False)
@shard_option("Only this shard; may be given several times.")
@click.option("--ref", metavar="NAME", help="Let this ref name it there [default: the same, if ROOT is a ref].")
@click.option("--no-ref", is_flag=True, help="Move no ref there.")
@click.option("--create", is_flag=True, help="There may be no store yet; making it is not in the plan.")
@max_age_option
@_PRICES
def push(
    session: Session,
    root: str,
    destination: str | None,
    shards: tuple[int, ...],
    ref: str | None,
    no_ref: bool,
    create: bool,
    max_age: float,
    prices: Path | None,
) -> None:
    """Say what ckpt push would do with the same arguments."""
    table = _table(prices)
    source = session.store()
    digest = source.resolve(root)
    scope = session.scope(source, digest, shards)
    moved = ref_to_move(root, ref, no_ref, scope)
    target: Store | str
    try:
        target = other_store(source, destination)
    except NotFoundError:
        if not create or destination is None:
            raise
        target = ckptstore.known_remotes(source).get(destination, destination)
    plan = ckptstore.plan_push(source, target, digest, shards=scope, ref=moved, max_age=int(max_age))
    _print(session, plan, source.url, target if isinstance(target, str) else target.url, table)


@command("pull", codes=(3, 4, 5, 6, 9))
@click.argument("root")
@click.argument("origin", metavar="[URL|REMOTE]", required=False)
@shard_option("Only this shard; may be given several times.")
@click.option("--ref", metavar="NAME", help="Let this ref name it here [default: the same, if ROOT is a ref there].")
@click.option("--no-ref", is_flag=True, help="Move no ref here.")
@click.option("--no-files", is_flag=True, help="Leave out trees of files, which restoring a shard does not need.")
@max_age_option
@_PRICES
def pull(
    session: Session,
    root: str,
    origin: str | None,
    shards: tuple[int, ...],
    ref: str | None,
    no_ref: bool,
    no_files: bool,
    max_age: float,
    prices: Path | None,
) -> None:
    """Say what ckpt pull would do with the same arguments."""
    table = _table(prices)
    target = session.store()
    source = other_store(target, origin)
    digest = source.resolve(root)
    scope = session.scope(source, digest, shards)
    moved = ref_to_move(root, ref, no_ref, scope)
    plan = ckptstore.plan_pull(
        source, target, digest, shards=scope, ref=moved, files=not no_files, max_age=int(max_age)
    )
    _print(session, plan, source.url, target.url, table)


def _table(path: Path | None) -> Prices | None:
    if path is None:
        return None
    try:
        return Prices.parse(path.read_text("utf-8"))
    except (OSError, UnicodeError) as error:
        raise UsageError(f"price table {path}", str(error)) from None


def _print(session: Session, plan: Plan, source: str, target: str, prices: Prices | None) -> None:
    # What is sent stays at the target: that is what is paid for month by month.
    cost = None if prices is None else prices.cost(plan.traffic, plan.sent_bytes if plan.target.total else 0)
    if session.json:
        told: dict[str, object] = {
            "type": f"plan-{plan.operation}",
            "root": str(plan.root),
            "source": source,
            "target": target,
            "sent_keys": plan.sent_keys,
            "sent_bytes": plan.sent_bytes,
            "present_keys": plan.present_keys,
            "present_bytes": plan.present_bytes,
            "accepted_keys": plan.accepted_keys,
            "accepted_bytes": plan.accepted_bytes,
            "traffic": {
                "source": traffic_record(plan.source) if plan.source.total else None,
                "target": traffic_record(plan.target) if plan.target.total else None,
            },
            "notes": list(plan.notes),
            "cost": None,
        }
        if prices is not None and cost is not None:
            told["cost"] = {
                "currency": prices.currency,
                "as_of": prices.as_of,
                "requests": _amount(cost.requests),
                "bytes_in": _amount(cost.bytes_in),
                "bytes_out": _amount(cost.bytes_out),
                "once": _amount(cost.once),
                "stored_month": _amount(cost.stored_month),
            }
        output.record(told)
        return
    accepted = f"; {output.count(plan.accepted_keys, 'key')} accepted unread" if plan.accepted_keys else ""
    output.line(
        f"{plan.operation} {plan.root} to {target} would send {output.count(plan.sent_keys, 'key')}, "
        f"{plan.sent_bytes:,} bytes, and read {plan.present_bytes:,} bytes of {plan.present_keys:,} present{accepted}"
    )
    for url, traffic in ((source, plan.source), (target, plan.target)):
        print_traffic(url, traffic if traffic.total else None)
    for note in plan.notes:
        session.note(note)
    if prices is not None and cost is not None:
        output.line(
            f"cost: {_amount(cost.once)} {prices.currency} once (requests {_amount(cost.requests)}, "
            f"in {_amount(cost.bytes_in)}, out {_amount(cost.bytes_out)}), and "
            f"{_amount(cost.stored_month)} {prices.currency} a month for what is sent"
        )
        output.line(f"by prices of {prices.as_of} from {prices.source}")


def _amount(amount: Decimal) -> str:
    """To a millionth: a request costs less than a cent."""
    return f"{amount:.6f}"


for _command in (push, pull):
    COMMAND.add_command(_command)
