"""Another number of workers: the state root stays, and after further updates it is equal again, whoever owns what."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest, ShardReceipt, Store
from ckptstore.errors import RefusedError, UsageError
from tests.trainer.conftest import in_threads
from tests.trainer.pair import REF, Pair, prepare_small, store_preparation
from trainer.compute import numerics
from trainer.compute.config import param_table, parse_cuts, partition, show_cuts
from trainer.lifecycle import admission
from trainer.preparation import staged
from trainer.preparation.prepare import Prepared
from trainer.repartition import paths, plan_of
from trainer.workers import events, orders
from trainer.workers.events import make
from trainer.workers.launch import Launch, worker_arguments
from trainer.workers.orders import Arm, Close, Restore, Save, Start, Train
from trainer.workers.worker import events_path

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS: dict[int, tuple[int, ...]] = {1: (), 2: (2,), 3: (1, 3), 4: (1, 2, 3)}  # cuts by number of workers


@dataclass(frozen=True)
class Trained:
    """A small run with a checkpoint of two workers after two updates, and one more after four."""

    folder: Path
    prepared: Prepared
    identity: Digest
    two: Digest
    four: Digest

    @property
    def url(self) -> str:
        return str(self.folder / "operator")

    def store(self) -> Store:
        return ckptstore.open(self.url)

    def copy(self, folder: Path) -> Trained:
        """The same with a store of its own."""
        shutil.copytree(self.folder / "operator", folder / "operator")
        return Trained(folder, self.prepared, self.identity, self.two, self.four)


@pytest.fixture(scope="module")
def trained(process: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    prepared = prepare_small(folder)
    operator = ckptstore.open(folder / "operator", create=True)
    identity = store_preparation(prepared, operator)
    pair = Pair(folder / "area", prepared, identity, in_threads).started()
    pair.train(1, 2)
    two = pair.commit(operator, 2)
    pair.train(3, 4)
    operator.move_ref("straight", two, None)  # so that the first one still names the checkpoint after two updates
    return Trained(folder, prepared, identity, two, pair.commit(operator, 4, ref="straight"))


def test_after_further_updates_one_and_three_workers_have_the_state_root_of_two(
    trained: Trained, tmp_path: Path
) -> None:
    run = trained.copy(tmp_path)
    store = run.store()
    config = run.prepared.plan.config
    before, after = (store.checkpoint(root).state_root for root in (run.two, run.four))
    assert before != after
    root = run.two
    for number, workers in enumerate((3, 1)):
        cuts = LAYOUTS[workers]
        root = ckptstore.repartition(store, root, paths(partition(config, cuts)), ref=REF).root
        assert store.checkpoint(root).state_root == before
        ref = f"workers-{workers}"
        store.move_ref(ref, root, None)
        group = Pair(tmp_path / f"area-{number}", run.prepared, run.identity, in_threads, cuts).restored(store, root)
        group.train(3, 4)
        made = store.checkpoint(group.commit(store, 4, ref=ref))
        assert (made.state_root, len(made.shards), made.parent) == (after, workers, root)


COMMAND = """
import sys
from trainer.commands import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CKPT_STORE"}
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "repartition", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
    )


def test_the_command_finds_the_plan_by_the_checkpoint_moves_its_ref_and_says_what_stayed(
    trained: Trained, tmp_path: Path
) -> None:
    run = trained.copy(tmp_path)
    store = run.store()
    done = command(REF, "--cuts", "1,3", CKPT_STORE=run.url)
    assert (done.returncode, done.stderr) == (0, "")
    head = store.head(REF)
    assert head is not None
    assert head != run.two
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if not line.startswith("s"))
    assert said["root"] == str(head)
    assert said["parent"] == str(run.two)
    assert f"state root  {store.checkpoint(run.two).state_root}, as before" in done.stdout
    assert said["taken"].endswith("; 0 of them written")
    assert said["deviation"] == "generators: those of the parent's shards 0, 1, 0, expected each shard's own"
    for owner in partition(run.prepared.plan.config, (1, 3)):
        assert f"{owner.parameters:,} parameters" in done.stdout
        held = {entry.path for entry in store.closure(head).shards[owner.index].entries}
        assert held == {name for name, _ in owner.tensors}


def test_the_command_does_nothing_to_a_checkpoint_that_has_these_shards(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.commands import main

    run = trained.copy(tmp_path)
    keys = {stat.key for stat in run.store().backend.list("")}
    assert main(["repartition", run.two.hex[:12], "--cuts", "2", "--store", run.url, "--ref", REF]) == 0
    assert capsys.readouterr().out == f"{run.two} has these shards already; nothing was written\n"
    assert {stat.key for stat in run.store().backend.list("")} == keys


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["small", "--cuts", "0"], 2, "cuts (0,) leave a shard without layers"),
        (["small", "--cuts", "3,1"], 2, "cuts (3, 1) leave a shard without layers"),
        (["small", "--cuts", "9" * 6], 2, "no layer numbers with commas between them"),
        (["small", "--cuts", "1,-1"], 2, "no layer numbers with commas between them"),
        (["{two}", "--cuts", "none", "--ref", "straight"], 6, "ref straight"),
        (["{four}", "--cuts", "none", "--store", "{nowhere}"], 4, "nowhere"),
        (["{parentless}", "--cuts", "none"], 5, "it names no preparation"),
        (["{two}", "--cuts", "none"], 2, "2 refs name it (other, small) (say which"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    from tests.support.training import commit_state
    from trainer.commands import main

    run = trained.copy(tmp_path)
    store = run.store()
    store.move_ref("other", run.two, None)
    import torch

    plain = commit_state(store, "plain", [ckptstore.TrainingState(model=torch.nn.Linear(2, 2))], 1)
    names = {"two": run.two, "four": run.four, "parentless": plain, "nowhere": tmp_path / "nowhere"}
    given = [argument.format(**names) for argument in arguments]
    given += [] if "--store" in given else ["--store", run.url]
    try:
        done = main(["repartition", *given])
    except SystemExit as error:  # argparse's own
        done = error.code  # type: ignore[assignment]
    assert done == code
    out, errors = capsys.readouterr()
    assert says in errors
    assert out == ""
    assert len([line for line in errors.splitlines() if "error" in line or line.startswith("trainer: ")]) == 1


def test_the_starting_weights_are_for_the_shards_of_the_plan(trained: Trained, tmp_path: Path) -> None:
    group = Pair(tmp_path, trained.prepared, trained.identity, in_threads, ())
    with pytest.raises(UsageError, match="staged for 2 shards"):
        group.each(Start())


@pytest.mark.parametrize("cuts", LAYOUTS.values())
def test_cuts_survive_being_written_down(cuts: tuple[int, ...]) -> None:
    assert parse_cuts(show_cuts(cuts)) == cuts
    assert parse_cuts("") == ()


def test_a_launch_with_other_cuts_tells_its_workers_and_knows_who_owns_what(trained: Trained, tmp_path: Path) -> None:
    from trainer.workers.hosts import Host

    plan, host = trained.prepared.plan, Host(tmp_path, "host-0")
    usual = Launch(plan, trained.identity, tmp_path)
    other = Launch(plan, trained.identity, tmp_path, cuts=(1, 3))
    assert usual.owners == plan.owners
    assert "--cuts" not in worker_arguments(usual, 1, host, [])
    argv = worker_arguments(other, 1, host, [])
    assert argv[argv.index("--cuts") + 1] == "1,3"
    joined = [
        make(
            "joined",
            {
                "shard": owner.index,
                "tensors": [name for name, _ in owner.tensors],
                "parameters": owner.parameters,
                "fenced": True,
                "staged_sources": True,
            },
        )
        for owner in other.owners
    ]
    owned = admission.check_ownership(plan, joined, other.owners)
    assert sum(one["tensors"] for one in owned) == len(param_table(plan.config))


def test_a_host_that_restores_is_staged_without_starting_weights(trained: Trained) -> None:
    store = trained.store()
    preparation = store.preparation(trained.identity)
    trees = {"plan": store.tree(preparation.plan), "inputs": store.tree(preparation.inputs)}
    files = staged.files_for(trees, None)
    assert not [path for path in files if "weights/shard-" in path]
    assert len(files) == len(staged.files_for(trees, 0)) - 1
    assert {one.path for one in staged.left_out(trees, None)} == {
        f"inputs/{staged.weights_path(shard)}" for shard in (0, 1)
    }
    assert not [asset for asset in staged.required_assets(None) if "weights" in asset.role]


def test_a_checkpoint_of_another_program_has_no_plan(trained: Trained, tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "store", create=True)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "notes").write_text("of something else")
    tree = store.put_tree(tmp_path / "files")
    attempt = store.begin("main")
    import torch

    state = ckptstore.TrainingState(model=torch.nn.Linear(2, 2))
    receipt = store.save_shard(state, attempt, step=1, run=store.put_preparation(tree, tree, tree))
    root = store.commit(attempt, [receipt])
    with pytest.raises(RefusedError, match=r"has no plan\.json"):
        plan_of(store, root)
    assert plan_of(trained.store(), trained.two) == trained.prepared.plan


def by_processes(
    prepared: Prepared, store: Store, identity: Digest, ref: str, area: Path, cuts: tuple[int, ...], first: int
) -> Digest:
    """Two updates from ``first`` on, by a group of real processes over gloo; commits to ``ref``, from whose head they
    start if there is one."""
    attempt = store.begin(ref)
    there = store.url.removeprefix("file:")
    begin = [Start()] if attempt.parent is None else [Restore(attempt.parent, there), Arm()]
    given = [*begin, Train(first, first + 1), Save(str(attempt), first + 1, there), Close()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    area.mkdir()
    (area / "orders").write_bytes(b"".join(map(orders.encode, given)))
    started: list[subprocess.Popen[bytes]] = []
    hosts = [area / f"host-{rank}" for rank in range(len(cuts) + 1)]
    for rank, host in enumerate(hosts):
        shutil.copytree(prepared.plan_dir, host / "plan")
        shutil.copytree(prepared.inputs_dir, host / "inputs")
        arguments = ["--host", str(host), "--identity", str(identity), "--orders", str(area / "orders")]
        variables = {
            **os.environ,
            **numerics.env_for(prepared.plan.numerics.kernels),
            "PYTHONPATH": str(ROOT),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        argv = [sys.executable, "-m", "trainer", "worker", *arguments, "--cuts", show_cuts(cuts)]
        started.append(subprocess.Popen(argv, env=variables, stderr=subprocess.PIPE))
    try:
        for process in started:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors.decode()
    finally:
        for process in started:
            process.kill()
            process.communicate()
    said = [event for rank, host in enumerate(hosts) for event in events.read(events_path(host, 0, rank))]
    receipts = [ShardReceipt.parse(event["receipt"].encode()) for event in said if event.name == "saved"]
    return store.commit(attempt, receipts)


@pytest.mark.deep
@pytest.mark.timeout(1200)  # fourteen interpreters with torch are started; on a loaded machine each takes its time
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_one_to_four_processes_over_gloo_reach_one_state_root(compute: str, tmp_path: Path) -> None:
    """From a checkpoint of two workers, by way of repartitions from one layout to the next, and back to two."""
    if compute == "bfloat16" and not numerics.bf16_supported():
        pytest.skip("this CPU has no BF16 kernels")
    prepared = prepare_small(tmp_path / "prepared", compute)
    store, config = ckptstore.open(tmp_path / "operator", create=True), prepared.plan.config
    identity = store_preparation(prepared, store)
    root = by_processes(prepared, store, identity, REF, tmp_path / "start", LAYOUTS[2], 1)
    store.move_ref("straight", root, None)
    straight = by_processes(prepared, store, identity, "straight", tmp_path / "straight", LAYOUTS[2], 3)
    expected = store.checkpoint(straight)
    for number in (3, 1, 4, 2):
        cuts = LAYOUTS[number]
        before = store.checkpoint(root).state_root
        root = ckptstore.repartition(store, root, paths(partition(config, cuts)), ref=REF).root
        ref = f"workers-{number}"
        store.move_ref(ref, root, None)
        made = store.checkpoint(by_processes(prepared, store, identity, ref, tmp_path / ref, cuts, 3))
        assert len(made.shards) == number
        assert store.checkpoint(root).state_root == before
        assert (made.state_root, made.progress) == (expected.state_root, expected.progress)
