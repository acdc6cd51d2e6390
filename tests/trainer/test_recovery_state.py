"""What a run does next is a pure function of its journal: whatever is lost, whenever, the plan is carried out."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ckptstore import Digest
from trainer.recovery import entries, state
from trainer.recovery.entries import Begun, Entry
from trainer.recovery.state import State, apply, decide, fold

ANY = Digest.of(b"any")
BEGUN = Begun("demo", "float32", "native", "", "run", ANY, ANY, ANY, ANY, 2, (2, 4, 5))
OPENED = entries.Opened(1, 2, 0, 0)


def committed(step: int) -> entries.Committed:
    return entries.Committed(step, Digest.of(bytes([step])), ANY, (f"0 of {step}", f"1 of {step}"), 0, 0, 0, 0)


def updated(number: int) -> entries.Updated:
    return entries.Updated(number, float(number).hex(), "0x0p+0", "0x0p+0")


class World:
    """Carries out what is decided without doing anything, and remembers what is committed, as a store does."""

    def __init__(self, spares: int = 2, *, behind: bool = True) -> None:
        self.journal: list[Entry] = [entries.Opened(1, spares, 0, 0)]
        self.commits: list[int] = []
        self.behind = behind

    @property
    def state(self) -> State:
        return fold(self.journal)

    def step(self) -> state.Action:
        """Do the next thing."""
        action = decide(self.state)
        self.journal += self.outcome(action)
        return action

    def outcome(self, action: state.Action) -> Sequence[Entry]:
        match action:
            case state.Prepare():
                return [BEGUN]
            case state.Assign(shard=shard, host=host):
                return [entries.Assigned(shard, host)]
            case state.Choose():
                step = self.commits[-1] if self.commits else 0
                return [entries.Chosen(Digest.of(bytes([step])) if step else None, step, ())]
            case state.Stage(chosen=chosen):
                return [entries.Staged(shard, f"h{shard}", chosen.root, 0, 0, 0, 0, 0) for shard in range(2)]
            case state.Launch(generation=generation, chosen=chosen):
                return [entries.Launched(generation, ("a", "b"), (1, 2)), entries.Ready(generation, chosen.step)]
            case state.Train(first=first, last=last):
                return [updated(number) for number in range(first, last + 1)]
            case state.Commit(step=step):
                return [entries.Snapped(step, (1, 1), 0)] if self.behind else [self.commit(step)]
            case state.Await():
                pending = self.state.pending
                assert pending is not None
                return [self.commit(pending.step)]
            case state.Finish():
                return [entries.Finished(ANY, ANY)]
            case state.Clear():
                return [entries.Cleared(2, 0)]
        return []

    def commit(self, step: int) -> Entry:
        self.commits.append(step)
        return committed(step)

    def lose(self, shard: int | None) -> None:
        """A group is lost, with the host of a shard or only its connections."""
        host = None if shard is None else self.state.members[shard]
        named = ((shard,), (host,)) if shard is not None and host is not None else ((), ())
        self.journal.append(entries.Lost(1, *named, "silence", "", 0, 0))


def test_a_run_without_a_loss_commits_where_the_plan_says_and_ends() -> None:
    for behind in (True, False):
        world = World(behind=behind)
        actions = []
        while not isinstance(action := world.step(), state.Stop):
            actions.append(action)
        assert world.commits == [2, 4, 5]
        assert [action for action in actions if isinstance(action, state.Train)] == [
            state.Train(1, 2),
            state.Train(3, 4),
            state.Train(5, 5),
        ]


Happening = st.sampled_from(["step"] * 6 + ["reopen", "lose 0", "lose 1", "disconnect", "unwritten"])


@given(st.lists(Happening, max_size=60))
def test_whatever_is_lost_whenever_each_commit_is_made_once_and_in_order(happenings: list[str]) -> None:
    """Also what a controller did and was killed before it could write it down."""
    world = World(spares=100)
    for happening in happenings:
        match happening.split():
            case ["step"]:
                world.step()
            case ["reopen"]:
                world.journal.append(entries.Opened(2, 100, 0, 0))
            case ["unwritten"]:
                world.outcome(decide(world.state))
                world.journal.append(entries.Opened(2, 100, 0, 0))
            case ["lose", shard] if world.state.step is not None:
                world.lose(int(shard))
            case ["disconnect"] if world.state.step is not None:
                world.lose(None)
    world.journal.append(entries.Opened(3, 100, 0, 0))
    for _ in range(60):
        if isinstance(world.step(), state.Stop):
            break
    assert world.commits == [2, 4, 5]
    assert world.state.finished is not None
    assert world.state.reached == 5
    assert world.state.results == {}


def test_a_spare_host_takes_the_shard_of_a_lost_one_and_no_other() -> None:
    world = World()
    while world.state.step != 2:
        world.step()
    world.lose(1)
    assert world.state.members == ("host-0", None)
    assert world.step() == state.Choose()
    assert world.step() == state.Assign(1, "host-2")
    assert world.state.members == ("host-0", "host-2")
    assert world.state.spares_left == 1


def test_without_a_spare_host_nothing_is_done_until_there_is_one() -> None:
    world = World(spares=0)
    while world.state.step != 2:
        world.step()
    world.lose(0)
    world.step()
    assert decide(world.state) == state.NoSpare(0)
    world.journal.append(entries.Opened(2, 1, 0, 0))
    world.step()
    assert decide(world.state) == state.Assign(0, "host-2")


def test_a_loss_after_the_last_commit_needs_no_spare() -> None:
    world = World(spares=0, behind=False)
    while world.commits != [2, 4, 5]:
        world.step()
    world.lose(0)
    assert world.step() == state.Choose()
    assert world.step() == state.Finish()


def test_a_lost_connection_costs_no_host() -> None:
    world = World(spares=0)
    while world.state.step != 2:
        world.step()
    world.lose(None)
    assert world.state.members == ("host-0", "host-1")
    assert isinstance(decide(world.state), state.Choose)


def test_losses_without_one_new_update_are_given_up_and_the_same_command_tries_again() -> None:
    world = World(spares=9)
    for _ in range(state.PATIENCE):
        while world.state.step is None:
            world.step()
        world.lose(0)
    world.step()
    assert decide(world.state) == state.Futile(state.PATIENCE)
    world.journal.append(entries.Opened(2, 9, 0, 0))
    world.step()
    assert not isinstance(decide(world.state), state.Futile)


def test_an_update_that_is_made_again_is_no_progress_and_a_new_one_is() -> None:
    begun = fold([OPENED, BEGUN, updated(1), entries.Lost(1, (), (), "", "", 0, 0)])
    assert begun.futile == 1
    assert apply(begun, updated(1)).futile == 1
    assert apply(begun, updated(2)).futile == 0


def test_there_is_one_commit_at_a_time() -> None:
    world = World()
    while world.state.step != 4:
        world.step()
    assert world.state.pending is not None
    assert world.state.pending.step == 2
    assert decide(world.state) == state.Await()
    world.step()
    assert decide(world.state) == state.Commit(4)


def test_a_spare_has_its_shard_from_the_peer_that_is_left_and_only_of_the_checkpoint_that_is_restored() -> None:
    world = World(behind=False)
    while world.commits != [2]:
        world.step()
    root = Digest.of(bytes([2]))
    world.journal.append(entries.Replicated(root, ("host-1", "host-0"), (1, 1)))
    world.lose(1)
    world.step()
    assert state.replica(world.state, 1) == ("host-0", "1 of 2")
    assert state.replica(world.state, 0) is None  # its replica was lost with the host
    world.step()
    assert state.replica(world.state, 1) == ("host-0", "1 of 2")
    world.journal.append(entries.Chosen(Digest.of(b"another"), 1, ()))
    assert state.replica(world.state, 1) is None
