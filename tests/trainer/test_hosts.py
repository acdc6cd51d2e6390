"""Hosts and groups of workers: real processes, really lost. The workers are stand-ins without torch (standin.py)."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import Checkpoint, Digest, Store
from ckptstore.errors import RefusedError
from ckptstore.format import values
from ckptstore.format.progress import Progress
from trainer.lifecycle.commits import commit_by_way_of_hosts
from trainer.lifecycle.drill import Loss, lose_host
from trainer.lifecycle.expect import NotAsPlannedError
from trainer.preparation import planning, prepare
from trainer.preparation.plan import STOP, Plan, Timeouts
from trainer.workers.group import GroupLostError, LaunchedGroup
from trainer.workers.hosts import Host, clear
from trainer.workers.launch import Launch
from trainer.workers.orders import Start, Train

STAND_IN = Path(__file__).with_name("standin.py")
_SOME = Digest.of(b"some")
BEFORE = Checkpoint(16, None, _SOME, _SOME, _SOME, (_SOME,), (), (), Progress(), values.to_json({}), None, ())
ROOT = Digest.of(BEFORE.encode())  # the root before the loss
UPDATE = (
    '{"event":"update","at":1,"time":"t","update":1,"exact":{},"loss":1.0,"norm":1.0,"sent_bytes":1,'
    '"received_bytes":1,"ms":1.0}'
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    made = prepare.prepare(planning.profile("demo"), tmp_path_factory.mktemp("plan"), compute="float32").plan
    return replace(made, timeouts=Timeouts(group=10, hold=30, heartbeat=1, heartbeats_missed=1, commit=2))


@pytest.fixture
def launch(plan: Plan, tmp_path: Path) -> Iterator[Callable[..., LaunchedGroup]]:
    """Starts groups of stand-ins, given the behaviour of each; none outlives the test."""
    groups: list[LaunchedGroup] = []

    def start(*behaviours: dict[str, Any], timeouts: Timeouts = plan.timeouts) -> LaunchedGroup:
        hosts = []
        for number, behaviour in enumerate(behaviours):
            host = Host(tmp_path, f"host-{number}")
            (host.directory / "behaviour.json").write_text(json.dumps(behaviour))
            package = host.directory / "sources" / "trainer"
            package.mkdir(parents=True)
            (package / "__init__.py").touch()
            shutil.copy(STAND_IN, package / "__main__.py")
            hosts.append(host)
        planned = Launch(replace(plan, timeouts=timeouts), ROOT, tmp_path)
        groups.append(LaunchedGroup(planned, 1, "test", hosts, listen=lambda group, said: None))
        return groups[-1]

    yield start
    for group in groups:
        group.abort()


@pytest.fixture
def operator(tmp_path: Path) -> Store:
    store = ckptstore.open(tmp_path / "operator", create=True)
    store.objects.put_document(BEFORE.encode())
    store.refs.move("lifecycle", ROOT, None)
    return store


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_host_begins_as_an_empty_folder_and_ends_as_none(tmp_path: Path) -> None:
    host = Host(tmp_path, "host-2")
    assert host.listing() == []
    with pytest.raises(RefusedError, match="host-2"):
        Host(tmp_path, "host-2")
    (host.directory / "inputs").mkdir()
    (host.directory / "inputs" / "a").write_bytes(b"12345")
    assert host.listing() == ["inputs", "inputs/a"]
    before = host.directory
    kept = host.take_away()
    assert not before.exists()
    assert (kept / "inputs" / "a").read_bytes() == b"12345"
    receipt = host.clear()
    assert (receipt.files, receipt.bytes, receipt.gone) == (1, 5, True)
    assert not kept.exists()


def test_what_is_cleared_is_counted_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"x" * 1000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "outside")
    assert clear("folder", tmp_path / "folder").files == 1
    assert (tmp_path / "outside").exists()


def test_a_group_is_told_and_leaves_in_an_orderly_way(launch: Callable[..., LaunchedGroup], plan: Plan) -> None:
    group = launch({}, {})
    joined = group.join()
    assert [event["shard"] for event in joined] == [0, 1]
    group.tell(Start())
    group.tell(Train(1, 3))
    assert [sorted(group.updates(shard)) for shard in (0, 1)] == [[1, 2, 3]] * 2
    group.close()
    assert [(one.shard, one.status, one.gone) for one in group.endings] == [(0, 0, True), (1, 0, True)]
    assert not any(alive(process.pid) for process in group.processes)


def test_a_worker_gets_the_variables_of_the_plan_and_no_others_that_decide_bits(
    launch: Callable[..., LaunchedGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "OMP_NUM_THREADS": "7",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "5",
        "MASTER_PORT": "1234",
        "SOME_CREDENTIAL": "kept",
    }.items():
        monkeypatch.setenv(name, value)
    group = launch({}, {})
    seen = [event["environment"] for event in group.join()]
    assert [one["RANK"] for one in seen] == ["0", "1"]
    for one in seen:
        assert one["OMP_NUM_THREADS"] == "1"
        assert one["MKL_CBWR"] == "AUTO,STRICT"
        assert one["MASTER_PORT"] == "0"
        assert one["SOME_CREDENTIAL"] == "kept"
        assert not {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "TORCHELASTIC_USE_AGENT_STORE"} & one.keys()


def test_a_worker_that_dies_is_named_with_its_last_words(launch: Callable[..., LaunchedGroup]) -> None:
    group = launch({}, {"dies before joining": True})
    with pytest.raises(GroupLostError) as raised, group:
        group.join()
    assert "shard 1 on host-1: ended with exit code 1" in str(raised.value)
    assert "exit code 1; its last words: and gives up" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "generation-1-shard-1.stderr" in raised.value.hint
    assert all(one.gone for one in group.endings)
    assert not any(alive(process.pid) for process in group.processes)


def test_a_worker_that_is_killed_is_noticed_while_it_is_waited_for(launch: Callable[..., LaunchedGroup]) -> None:
    group = launch({}, {})
    group.join()
    group.processes[1].signal(signal.SIGKILL)
    with pytest.raises(GroupLostError, match="shard 1 on host-1: ended by SIGKILL"):
        group.tell(Start())


def test_a_worker_that_falls_silent_is_noticed_though_its_process_exists(launch: Callable[..., LaunchedGroup]) -> None:
    group = launch({}, {})
    group.join()
    group.processes[0].signal(signal.SIGSTOP)
    with pytest.raises(GroupLostError, match="shard 0 on host-0: 1 heartbeats"):
        group.tell(Start())
    assert group.processes[0].present()
    assert all(one.gone and one.status == -signal.SIGKILL for one in group.abort())


@pytest.mark.parametrize(
    ("garbage", "says"),
    [
        ("not an event", "not an event"),
        ('{"event":"update","at":1,"time":"t"}', "event update: it has no field update"),
        (UPDATE.replace('"ms":1.0', '"ms":"1.0"'), "event update: ms is '1.0', and has to be of type float"),
        (UPDATE.replace('"norm":1.0', '"norm":NaN'), "NaN is no number of JSON|not a line of JSON"),
        ('{"event":"closed","at":1,"time":"t","peak_rss":true}', "peak_rss is True"),
    ],
)
def test_a_worker_that_says_what_is_no_event_is_refused(
    launch: Callable[..., LaunchedGroup], garbage: str, says: str
) -> None:
    group = launch({}, {"garbage": garbage})
    group.join()
    with pytest.raises(GroupLostError, match=rf"shard 1 on host-1: MalformedError.*({says})"):
        group.tell(Start())


def test_a_controller_that_was_stopped_itself_takes_nobody_for_lost(launch: Callable[..., LaunchedGroup]) -> None:
    """What it then finds long ago is its own absence: the lines of the workers wait in their pipes."""
    group = launch({}, {})
    group.join()
    for shard in range(2):
        group.heard[shard] -= 100  # as after SIGSTOP and SIGCONT, before what has arrived is read
    group.tell(Start())
    group.tell(Train(1, 3))


def test_what_takes_longer_than_it_may_ends_the_group(launch: Callable[..., LaunchedGroup]) -> None:
    group = launch({}, {"never starts": True})
    group.join()
    with pytest.raises(GroupLostError, match=r"shard 1 on host-1: not started within 0\.2 s"):
        group.tell(Start(), 0.2)


def test_a_worker_that_stays_after_it_said_that_it_leaves_is_not_a_good_end(
    launch: Callable[..., LaunchedGroup], plan: Plan
) -> None:
    group = launch({}, {"stays": True}, timeouts=replace(plan.timeouts, group=1))
    group.join()
    with pytest.raises(GroupLostError, match=r"shard 1 on host-1: it said that it was leaving, and stayed"), group:
        group.close()
    assert not any(alive(process.pid) for process in group.processes)


def test_an_exit_code_that_is_not_0_fails_an_orderly_end(launch: Callable[..., LaunchedGroup]) -> None:
    group = launch({"exit": 3}, {})
    group.join()
    with pytest.raises(GroupLostError, match="exit code 3"):
        group.close()


def test_aborting_leaves_no_process_of_the_whole_group_behind(launch: Callable[..., LaunchedGroup]) -> None:
    group = launch({"child": True}, {})
    group.join()
    (child,) = (event["pid"] for event in group.events("child"))
    assert alive(child)
    assert all(one.gone for one in group.abort())
    assert not alive(child)
    assert os.getpgid(0) != group.processes[0].pid


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "NoSpaceError: the disk is full"),
        ("dies", "ended by SIGKILL"),
        ("stops", "heartbeats in a row"),
        ("never ends", "not saved within 2 s"),
    ],
)
def test_a_worker_that_fails_while_it_saves_ends_the_group_and_no_checkpoint_exists(
    launch: Callable[..., LaunchedGroup], operator: Store, how: str, says: str
) -> None:
    """B054 (radixark/miles#2516): nobody waits forever, the failed one is named, and the ref stays."""
    group = launch({}, {"save": how})
    group.join()
    with pytest.raises(GroupLostError, match=f"shard 1 on host-1: .*{says}"), group:
        commit_by_way_of_hosts(group, operator, "lifecycle", 16, ROOT)
    assert all(one.gone for one in group.endings)
    assert operator.head("lifecycle") == ROOT


def test_workers_that_report_other_losses_get_no_checkpoint(
    launch: Callable[..., LaunchedGroup], operator: Store
) -> None:
    group = launch({}, {"another loss in": 2})
    group.join()
    group.tell(Train(1, 3))
    expected = r"losses and norms of shard 1: expected those of shard 0, seen first difference in update 2: loss 0x1\.0"
    with pytest.raises(NotAsPlannedError, match=expected):
        commit_by_way_of_hosts(group, operator, "lifecycle", 3, ROOT)
    assert operator.head("lifecycle") == ROOT
    assert group.events("saved") == []


def test_a_ref_that_was_moved_meanwhile_gets_no_checkpoint_of_another_lineage(
    launch: Callable[..., LaunchedGroup], operator: Store
) -> None:
    group = launch({}, {})
    group.join()
    restored_from = Digest.of(b"the root that the group restored")
    with pytest.raises(NotAsPlannedError, match=f"root of ref lifecycle.*: expected {restored_from}, seen {ROOT}"):
        commit_by_way_of_hosts(group, operator, "lifecycle", 3, restored_from)
    assert group.events("saved") == []


def lose(group: LaunchedGroup, operator: Store, mode: str = "kill") -> Loss:
    drill = replace(group.launch.plan.drill, mode=mode)
    group.join()
    return lose_host(group, drill, 17, 32, operator, "lifecycle", ROOT, group.began)


def test_a_lost_host_is_noticed_and_the_survivor_aborted(launch: Callable[..., LaunchedGroup], operator: Store) -> None:
    group = launch({}, {})
    loss = lose(group, operator)
    assert (loss.host, loss.shard, loss.update, loss.completed, loss.discarded) == (
        "host-1",
        1,
        20,
        (19, 19),
        (17, 18, 19),
    )
    assert [(one.shard, one.sign) for one in loss.evidence] == [(1, "process gone"), (0, "connection lost")]
    assert 0 < loss.detection_ms == loss.evidence[0].ms
    assert loss.endings[1].status == -signal.SIGKILL
    assert all(one.gone for one in loss.endings)
    assert not any(alive(process.pid) for process in group.processes)


def test_a_silent_host_is_noticed_by_its_heartbeats(launch: Callable[..., LaunchedGroup], operator: Store) -> None:
    loss = lose(launch({"notices after": 60}, {}), operator, STOP)
    assert loss.detected_by == "1 heartbeats missed"
    assert [(one.shard, one.sign) for one in loss.evidence] == [(1, "1 heartbeats missed")]
    assert all(one.gone and one.status == -signal.SIGKILL for one in loss.endings)


@pytest.mark.parametrize(
    ("survivor", "lost", "expected"),
    [
        ({"finishes": True}, {}, r"last update that workers completed.*expected \{19\}, seen \{.*20"),
        # It says nothing of the update and its host has a record of it all the same.
        (
            {"finishes": True, "keeps to itself": ["update"]},
            {},
            r"last update that workers completed.*expected \{19\}, seen \{.*20",
        ),
        ({}, {"goes on": True}, r"operations of shard 1 .*seen .*shard 1 backward 0"),
        ({}, {"misses the fault point": True}, "expected shard 1 at its fault point in update 20, seen"),
    ],
)
def test_a_drill_that_goes_otherwise_says_expected_and_seen(
    launch: Callable[..., LaunchedGroup],
    operator: Store,
    survivor: dict[str, Any],
    lost: dict[str, Any],
    expected: str,
) -> None:
    with pytest.raises(NotAsPlannedError, match=expected):
        lose(launch({"notices after": 1, **survivor}, lost), operator)


def test_a_newer_root_than_expected_fails_the_drill(launch: Callable[..., LaunchedGroup], operator: Store) -> None:
    newer = Digest.of(b"somebody committed")
    operator.refs.move("lifecycle", newer, operator.refs.head("lifecycle"))
    with pytest.raises(NotAsPlannedError, match=f"head of lifecycle.*expected {ROOT}, seen {newer}"):
        lose(launch({}, {}), operator)
