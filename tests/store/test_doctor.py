"""What a training process lacks is said before its first save, and what a checkpoint lacks, from its documents."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import ckptstore
from ckptstore.completeness import inspect_checkpoint
from ckptstore.errors import UsageError
from ckptstore.gaps import Completeness, Gap, Part, Severity
from ckptstore.live.completeness import inspect_completeness
from ckptstore.store import Store
from tests.support.demo import demo_plan
from tests.support.documents import rewrite_shard
from tests.support.states import Held, Objects, mlp, save, train_step
from tests.support.training import make_training, seed_everything


def gaps(found: Completeness, part: Part, severity: Severity = Severity.SEVERE) -> list[str]:
    """What was found in a part, so severe."""
    wanted = (gap.what for gap in found.findings if (gap.part, gap.severity) == (part, severity))
    return [re.sub(r"test_\w+: ", "", what) for what in wanted]  # the function whose variable it is


OTHERS = re.compile(r"(^| )(tests|conftest)\.|that a library holds")
"""Names of what other tests of this process keep: globals of their modules, and their parameters in pytest's hands."""


def look(**objects: Any) -> Completeness:
    """What is found of this test's own; and of tokenizers, some of which are kept for all tests, nothing."""
    found = inspect_completeness(**objects)
    own = (gap for gap in found.findings if gap.part is not Part.FILES and not OTHERS.search(gap.what))
    return Completeness(tuple(own))


def whole() -> Objects:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "scheduler": schedules.StepLR(optimizer, 2)}


def test_nothing_is_said_of_what_is_whole() -> None:
    objects = whole()
    found = look(**objects)
    assert found == Completeness(())
    assert found.complete


def test_nothing_is_said_of_the_example_in_the_readme() -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    example = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "store.run(" in block)
    head = example[: example.index("store = ")]
    asked = "model=model, optimizer=optimizer, scheduler=scheduler"
    assert asked in example
    program = (
        f"{head}\nfrom ckptstore.live.completeness import inspect_completeness\nprint(inspect_completeness({asked}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


TRAINERS = {"torch": "2", "threads": 1, "deterministic": True, "compute": "float32", "canary.matmul": "b3:00"}
"""Some of what the trainer's binding holds; all of it takes seconds to measure."""


def test_nothing_severe_is_said_of_the_trainer() -> None:
    from trainer.compute.model import Shard
    from trainer.compute.step import build_optimizer

    plan = demo_plan()
    own = plan.owners[0]
    shard = Shard(plan.config, own.first, own.last, own.head, "float32")
    optimizer = build_optimizer(shard, plan.recipe)
    found = look(model=shard, optimizer={"adamw": optimizer}, binding=TRAINERS, cursors=["data"])
    assert [gap for gap in found.findings if gap.severity is not Severity.NOTE] == []


MADE: dict[str, Callable[[], Any]] = {
    "torch": torch.Generator,
    "numpy": lambda: np.random.default_rng(1),
    "legacy": lambda: np.random.RandomState(1),
    "python": lambda: random.Random(1),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_generator_that_nobody_registered_is_found(kind: str) -> None:
    """B001: what is drawn from it after a resume was drawn before."""
    made, objects = MADE[kind](), whole()
    assert gaps(look(**objects), Part.GENERATOR) == ["generator made"]
    assert gaps(look(**objects, generators={"own": made}), Part.GENERATOR) == []


def test_a_generator_is_found_wherever_the_program_keeps_it() -> None:
    class Sampler:
        held: Any = None
        shared = torch.Generator()

    def drawing() -> Iterator[int]:
        inner = torch.Generator()
        yield 1
        assert inner

    sampler = Sampler()
    sampler.held = (torch.Generator(),)
    mapping = {"deep": [{"generator": torch.Generator()}]}
    closure = [(lambda inner: lambda: inner)(torch.Generator())]
    started = drawing()
    next(started)
    found = gaps(look(**whole()), Part.GENERATOR)
    names = ["Sampler.shared", "sampler.held[0]", "mapping['deep'][0]['generator']", "closure[0] inner", "started"]
    assert sorted(found) == sorted(f"generator {name}" for name in names)
    assert [sampler, mapping, closure]


def test_generators_of_the_process_and_of_python_itself_are_not_meant() -> None:
    import secrets

    held = [torch.default_generator, random.random, np.random.rand, secrets.choice]
    assert gaps(look(**whole()), Part.GENERATOR) == []
    assert held


def test_the_generator_of_a_data_source_is_that_sources_to_save() -> None:
    training = make_training()
    found = look(**training.objects())
    assert found.complete
    assert gaps(found, Part.GENERATOR, Severity.NOTE) == ["generator data data.generator"]


def test_a_generator_that_spawned_others_is_told_of() -> None:
    generator = np.random.default_rng(1)
    generator.spawn(2)
    found = look(**whole(), generators={"own": generator})
    assert gaps(found, Part.GENERATOR, Severity.WARNING) == ["generator own"]


def test_what_was_made_and_not_passed_on_is_found() -> None:
    """The kind of omission that B001 and B015 are: it is there, it has a state, and nobody saves it."""
    objects = whole()
    second = torch.optim.SGD(objects["model"].parameters(), lr=0.1)
    scaler, disabled = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    average = AveragedModel(objects["model"])
    counter = Held({"n": 1})
    del objects["scheduler"]
    scheduler = schedules.SequentialLR(
        objects["optimizer"],
        [schedules.ConstantLR(objects["optimizer"]), schedules.StepLR(objects["optimizer"], 1)],
        [2],
    )
    found = look(**objects)
    assert gaps(found, Part.OPTIMIZER) == ["optimizer second"]
    assert gaps(found, Part.SCALER) == ["gradient scaler scaler"]
    assert gaps(found, Part.SCHEDULER) == ["scheduler scheduler"]
    assert gaps(found, Part.AVERAGE) == ["average average"]
    assert gaps(found, Part.STATE, Severity.WARNING) == ["counter"]
    objects = {
        "model": {"model": objects["model"], "average": average},
        "optimizer": {"first": objects["optimizer"], "second": second},
        "scheduler": scheduler,
        "scaler": scaler,
        "values": {"counter": counter},
    }
    assert look(**objects) == Completeness(())
    assert not disabled.is_enabled()


def test_what_only_a_library_holds_is_found_and_what_nobody_holds_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgotten() -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        schedules.StepLR(optimizer, 1)  # each refers to the other

    forgotten()
    assert look(**whole()) == Completeness(())
    monkeypatch.setattr("colorsys.kept", torch.amp.GradScaler("cpu"), raising=False)
    held = "gradient scaler a GradScaler that a library holds"
    assert held in gaps(inspect_completeness(**whole()), Part.SCALER)


class Moving(torch.optim.Optimizer):
    """An optimizer that counts in its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0, "decay": 0.5})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Counts."""
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                self.state[parameter] = {"z": torch.ones(1)}


def test_settings_that_an_optimizer_moves_itself_are_told_of() -> None:
    model = mlp()
    optimizer = Moving(model.parameters())
    assert look(model=model, optimizer=optimizer) == Completeness(())
    optimizer.step()
    found = look(model=model, optimizer=optimizer)
    assert gaps(found, Part.OPTIMIZER, Severity.WARNING) == ["optimizer optimizer"]
    assert "moving=['k']" in found.findings[0].hint
    assert look(model=model, optimizer=optimizer, moving=["k"]) == Completeness(())


def test_a_program_of_more_objects_than_are_looked_at_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.live.process.MOST_OBJECTS", 50)
    assert [gap.what for gap in look(**whole()).findings if gap.severity is Severity.NOTE] == ["process"]


def test_a_schedule_shows_in_the_groups_that_it_moved() -> None:
    objects = whole()
    del objects["scheduler"]
    assert gaps(look(**objects), Part.SCHEDULER) == ["optimizer optimizer: scheduler"]


class Loose(nn.Module):
    """A module that keeps things where no state_dict looks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.running = torch.zeros(2)
        self.history = {"mean": torch.zeros(1)}
        self.layers = [nn.Linear(2, 2)]
        self.scales = [nn.Parameter(torch.ones(2))]
        self.view = self.inner.weight.detach()[0]
        self.activation = self.inner.weight.sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


def test_what_a_module_keeps_outside_its_state_is_found() -> None:
    model = Loose()
    found = look(model=nn.Sequential(model), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert gaps(found, Part.BUFFER, Severity.NOTE) == ["buffer '0.table'"]
    assert gaps(found, Part.BUFFER, Severity.WARNING) == ["tensor '0.running'", "tensor \"0.history['mean']\""]
    assert gaps(found, Part.WEIGHTS) == ["module '0.layers[0]'", "parameter '0.scales[0]'"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_normalisations_recurrent_layers_and_prunings_keep_nothing_back() -> None:
    norm = nn.utils
    model = nn.Sequential(
        norm.weight_norm(nn.Linear(4, 4)),
        norm.spectral_norm(nn.Linear(4, 4)),
        norm.parametrizations.weight_norm(nn.Linear(4, 4)),
        norm.parametrizations.spectral_norm(nn.Linear(4, 4)),
        norm.prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
        nn.BatchNorm1d(4),
        nn.ParameterList([torch.ones(2)]),
        torch.compile(nn.Linear(4, 4), backend="eager"),
    )
    recurrent, attention = nn.LSTM(4, 4, 2), nn.MultiheadAttention(4, 2)
    with torch.no_grad():
        model[:6](torch.ones(3, 4))
    every = {"net": model, "recurrent": recurrent, "attention": attention}
    parameters = [p for module in every.values() for p in module.parameters()]
    assert look(model=every, optimizer=torch.optim.SGD(parameters, lr=0.1)) == Completeness(())


def test_what_a_state_dict_leaves_out_is_found() -> None:
    class Adapter(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            del destination[prefix + "bias"]

    found = look(model=nn.Sequential(Adapter(2, 2)))
    assert gaps(found, Part.WEIGHTS, Severity.WARNING) == ["parameter '0.bias'"]


def test_what_an_optimizer_keeps_in_attributes_of_its_own_is_told_of() -> None:
    """A kind of omission: a counter or an average that no state_dict has begins anew after a resume, without a word."""

    class Counting(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.count = 0
            self.averages = {"first": torch.zeros(1)}

    model = mlp()
    optimizer = Counting(model.parameters())
    objects: Objects = {"model": model, "optimizer": optimizer, "scheduler": schedules.StepLR(optimizer, 2)}
    train_step(objects)
    found = look(**objects)
    assert [(gap.severity, gap.what) for gap in found.findings] == [
        (Severity.WARNING, "optimizer optimizer: tensors"),
        (Severity.NOTE, "optimizer optimizer: numbers"),
    ]
    assert "'averages' of Counting" in found.findings[0].why
    assert "'count' of Counting" in found.findings[1].why


def test_parameters_that_no_optimizer_has_are_found_and_averages_are_not_meant() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    average = AveragedModel(model)
    found = look(model={"model": model, "average": average}, optimizer=optimizer)
    assert [(gap.part, gap.severity) for gap in found.findings] == [(Part.OPTIMIZER, Severity.WARNING)]
    assert "'model.2.weight'" in found.findings[0].why


def test_all_that_a_save_would_refuse_is_listed_at_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, device="meta"), "b": nn.Linear(2, 2)})
    stray = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model["b"].parameters(), stray], lr=0.1)
    mine = torch.optim.SGD(model["b"].parameters(), lr=0.1)
    mine.state[model["b"].weight] = {"odd": {1, 2}}  # type: ignore[index]
    found = look(
        model=model,
        optimizer={"stray": optimizer, "mine": mine},
        scheduler=Held({"fn": len}),
        generators=[random.SystemRandom()],
    )
    whats = [gap.what for gap in found.severe]
    assert whats == [
        "weight 'a.weight'",
        "weight 'a.bias'",
        "optimizer stray group 0",
        "optim/mine/odd 'b.weight'",
        "scheduler scheduler['fn']",
        "generator generator.0",
    ]
    assert all("a save refuses it" in gap.why for gap in found.severe)


def loader(shuffle: bool = True, workers: int = 0, generator: torch.Generator | None = None) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4, 4)), shuffle=shuffle, num_workers=workers, generator=generator)


def batched() -> DataLoader[Any]:
    """A loader whose order is that of a sampler of batches."""
    samples = TensorDataset(torch.ones(4, 4))
    return DataLoader(samples, batch_sampler=BatchSampler(RandomSampler(samples), 2, False))


@pytest.mark.parametrize(
    ("make", "cursors", "severity"),
    [
        (loader, (), Severity.SEVERE),
        (lambda: loader(False, 2), (), Severity.SEVERE),
        (lambda: batched(), (), Severity.SEVERE),
        (lambda: loader(False), (), Severity.WARNING),
        (loader, ["data"], Severity.WARNING),
        (lambda: loader(False), ["data"], None),
    ],
)
def test_a_loader_whose_position_is_not_saved_is_found(make: Any, cursors: Any, severity: Severity | None) -> None:
    """B008: with its reasons."""
    held = make()
    found = look(**whole(), cursors=cursors)
    assert [gap.severity for gap in found.findings if gap.part is Part.DATA] == ([severity] if severity else [])
    assert gaps(look(**whole(), data=Held({"n": 1})), Part.DATA) == []
    assert held is not None


def test_a_registered_generator_under_a_cursor_is_enough() -> None:
    generator = torch.Generator()
    held = loader(generator=generator)
    assert look(**whole(), cursors=["data"], generators=[generator]) == Completeness(())
    assert held is not None


class SomeTokenizerFast:
    chat_template = None

    def __init__(self, template: str | None = None) -> None:
        self.chat_template = template


def test_a_tokenizer_without_files_and_a_template_that_is_not_among_them_are_found(
    store: Store, tmp_path: Path
) -> None:
    """B089."""
    tokenizer = SomeTokenizerFast("{{ messages }}")
    assert gaps(inspect_completeness(**whole()), Part.FILES, Severity.WARNING)[-1:] == ["tokenizer tokenizer"]
    (tmp_path / "config.json").write_text("{}")
    tree = store.tree(store.put_tree(tmp_path))
    found = inspect_completeness(**whole(), files=tree)
    assert gaps(found, Part.FILES, Severity.WARNING) == ["tokenizer", "chat template"]
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("x")
    found = inspect_completeness(**whole(), files=store.tree(store.put_tree(tmp_path)))
    assert [gap for gap in found.findings if gap.part is Part.FILES] == []
    assert tokenizer.chat_template


def test_a_binding_that_says_nothing_of_what_decides_bits_is_found() -> None:
    found = look(**whole(), binding={"machine": "fast"})
    assert gaps(found, Part.BINDING, Severity.WARNING) == ["binding"]
    enough = {"versions": {"torch": "2"}, "threads": 1, "deterministic": True}
    assert look(**whole(), binding=enough) == Completeness(())


def test_looking_changes_nothing_and_keeps_nothing_alive() -> None:
    import weakref

    class Loud(Held):
        def state_dict(self) -> Any:
            raise AssertionError("a data source may draw random numbers when it is asked")

    seed_everything()
    objects = whole() | {"data": Loud({}), "generators": [torch.Generator()]}
    scratch: Any = mlp()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index, union-attr]
    alive = weakref.ref(scratch)
    look(**objects)
    del scratch
    assert sys.gettrace() is not None or alive() is None
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index, union-attr]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert objects["optimizer"].state == {}


def test_wrong_arguments_are_those_of_a_run() -> None:
    with pytest.raises(UsageError, match="data is a"):
        look(data=loader())


def test_a_run_can_be_asked_before_its_first_save(store: Store, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    objects = whole()
    tokenizer = SomeTokenizerFast("x")
    with store.run("main", **objects, files=store.put_tree(tmp_path)) as run:
        assert gaps(run.inspect(cursors=["data"]), Part.FILES, Severity.WARNING) == ["chat template"]
        run.resume()
        train_step(objects)
        run.save(1)
    assert tokenizer


def saved(store: Store, objects: Objects, step: int = 1, **options: Any) -> Completeness:
    return inspect_checkpoint(store, save(store, objects, step, **options))


def test_a_checkpoint_tells_what_it_lacks(store: Store, tmp_path: Path) -> None:
    objects = whole()
    train_step(objects)
    del objects["scheduler"]
    found = saved(store, objects)
    assert gaps(found, Part.SCHEDULER) == ["checkpoint optimizer optimizer: scheduler"]
    assert gaps(found, Part.DATA, Severity.WARNING) == ["data position"]
    assert gaps(found, Part.BINDING, Severity.WARNING) == ["binding"]
    assert gaps(found, Part.FILES, Severity.NOTE) == ["files"]
    assert not found.complete
    weights = saved(store, {"model": objects["model"]}, 2)
    assert gaps(weights, Part.OPTIMIZER, Severity.WARNING) == ["optimizer"]
    assert weights.complete


def test_a_checkpoint_of_a_whole_run_tells_nothing(store: Store, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("x")
    training = make_training()
    with store.run("main", **training.objects(), files=store.put_tree(tmp_path)) as run:
        run.resume()
        training.step()
        assert inspect_checkpoint(store, run.save(1)) == Completeness(())


def test_a_template_that_was_excluded_from_the_files_is_told_of(store: Store, tmp_path: Path) -> None:
    """B089: the reason stands beside it."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("x")
    training = make_training()
    files = store.put_tree(tmp_path, {"chat_template.jinja": "not JSON"})
    with store.run("main", **training.objects(), files=files) as run:
        run.resume()
        training.step()
        found = inspect_checkpoint(store, run.save(1))
    assert [(gap.severity, gap.what) for gap in found.findings] == [(Severity.WARNING, "chat template")]
    assert "not JSON" in found.findings[0].why


def test_a_checkpoint_without_a_generator_or_its_parent_is_told_of(store: Store) -> None:
    """B001."""
    training = make_training()
    first = None
    with store.run("main", **training.objects()) as run:
        run.resume()
        for step in (1, 2):
            training.step()
            first, root = run.root, run.save(step)
    short = rewrite_shard(store, root, 0, lambda shard: {"rng": tuple(e for e in shard.rng if e.name != "torch.cpu")})
    assert gaps(inspect_checkpoint(store, short), Part.GENERATOR) == ["checkpoint generator torch.cpu"]
    assert first is not None
    store.backend.delete(ckptstore.format.keys.document_key(first))
    assert gaps(inspect_checkpoint(store, root), Part.HISTORY) == [f"parent {first.short}"]


def test_files_that_a_store_does_not_hold_are_told_of(store: Store, disk_store: Store, tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "tokenizer.json").write_text("{}")
    training = make_training()
    with store.run("main", **training.objects(), files=store.put_tree(tmp_path / "some")) as run:
        run.resume()
        training.step()
        root = run.save(1)
    ckptstore.pull(store, disk_store, root, shards=[0], files=False)
    assert [gap.what for gap in inspect_checkpoint(disk_store, root).findings] == ["files"]


def test_the_severe_come_first_and_each_once() -> None:
    one = Gap(Severity.NOTE, Part.DATA, "a", "b", "c")
    two = Gap(Severity.SEVERE, Part.DATA, "a", "b", "c")
    found = Completeness.of([one, two, one])
    assert found.findings == (two, one)
    assert str(found) == "severe: a: b (c)\nnote: a: b (c)"
