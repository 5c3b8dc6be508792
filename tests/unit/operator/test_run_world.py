"""A training run in a cluster where anything may happen at any time."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentfly.api import TrainingRunStatus
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly.roles.launch import Report
from agentfly_operator.plan.run import plan_run
from agentfly_operator.plan.run_attempt import in_attempt
from agentfly_operator.plan.run_engine import by_kuberay
from agentfly_operator.plan.run_seen import PodOf, PolicyOf, PrepareOf, RunObserved
from agentfly_operator.plan.run_steps import MakeAttempt, RunPlan
from tests.unit.operator.run_world import World

UNSEEN_S = 4  # for so long what was just made may not be seen
OVER = (Phase.Succeeded, Phase.Failed)
EXITS = st.sampled_from([1, 85, 85, 137, 143, 86, 1, 85, 0, 87])


class _Late(World):
    """A world whose pods are seen only a while after they were made."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.born: dict[str, Any] = {}

    def seen(self) -> RunObserved:
        whole = super().seen()
        return replace(whole, pods=tuple(pod for pod in whole.pods if self.visible(pod)))

    def visible(self, pod: PodOf) -> bool:
        return bool(self.now >= self.born.setdefault(pod.uid, self.now) + timedelta(seconds=UNSEEN_S))

    def carry_out(self, step: Any) -> None:
        super().carry_out(step)
        for pod in self.pods.values():
            self.born.setdefault(pod.uid, self.now)


class AnyWorld(RuleBasedStateMachine):
    """Random events between looks of an operator that may be slow, restart, or do half of its steps."""

    @initialize(
        nodes=st.sampled_from([1, 2]),
        engine=st.sampled_from(["Auto", "Native", "KubeRay", "KubeRay"]),
        late=st.booleans(),
        backoff=st.sampled_from([0, 1, 3]),
    )
    def begin(self, nodes: int, engine: str, late: bool, backoff: int) -> None:
        kind = _Late if late else World
        limits = {"backoffLimit": backoff, "stallTimeoutSeconds": 1300, "activeDeadlineSeconds": 20000}
        self.world = kind(nodes=nodes, engine=engine, kuberay=True, policy=limits)
        self.heads: dict[int, str] = {}
        self.words: dict[int, Report] = {}
        self.attempt = 0
        self.over: TrainingRunStatus | None = None
        self.step = 0
        self.works()
        self.the_preparation_ends(0)
        self.works()

    # The operator

    def look(self, write: bool = True, share: int = 100) -> RunPlan:
        """One pass; ``share`` percent of its steps are done before it is stopped."""
        world = self.world
        stored = world.run.status
        plan = world.plan()
        assert plan == world.plan()
        assert plan.status is not None
        self.check(plan, stored)
        if write:
            world.write(plan)
        for step in plan.steps[: len(plan.steps) * share // 100]:
            world.carry_out(step)
        world.kuberay_acts()
        return plan

    def check(self, plan: RunPlan, stored: TrainingRunStatus) -> None:
        status = plan.status
        assert status is not None
        assert plan.wake_at is None or plan.wake_at > self.world.now
        true = {each.type for each in status.conditions if each.status == "True"}
        assert not {Type.Reconciling, Type.Stalled} <= true
        assert status.attempt in (stored.attempt, stored.attempt + 1)
        made = [step for step in plan.steps if isinstance(step, MakeAttempt)]
        assert made in ([], [MakeAttempt(stored.attempt, by_kuberay(stored))])
        if made:
            assert in_attempt(stored)
            assert not [each for each in self.world.clusters.values() if each.attempt != stored.attempt]
            assert not [pod for pod in self.world.pods.values() if pod.attempt != stored.attempt]
        if stored.phase in OVER:
            assert status.phase is stored.phase
            assert status.last_failure == stored.last_failure
            assert all(type(step).__name__ in ("Remove", "FinishWorkload") for step in plan.steps)
        said = self.words.get(status.attempt)
        if status.phase is Phase.Succeeded and by_kuberay(status):
            assert said is not None
            assert said.exit_code == 0
        after = self.world.run.model_copy(update={"status": status})
        again = plan_run(after, self.world.seen(), self.world.now)
        assert again.status == status
        assert again.events == ()

    @rule()
    def works(self) -> None:
        for _ in range(3):
            self.look()

    @rule(share=st.sampled_from([0, 50]), write=st.booleans())
    def is_stopped_in_the_middle(self, share: int, write: bool) -> None:
        self.look(write, share)

    @rule()
    def does_its_steps_before_its_status_is_written(self) -> None:
        plan = self.look(write=False)
        self.world.write(plan)

    @rule(seconds=st.sampled_from([1, 4, 10, 400]))
    def all_goes_well_for_a_while(self, seconds: int) -> None:
        self.works()
        self.what_is_deleted_is_gone()
        self.world.now += timedelta(seconds=seconds)
        self.works()
        self.pods_run()
        self.works()
        if self.trains():
            self.the_head_makes_a_step(saves=False)
            self.works()

    @rule()
    def forgets_what_the_head_said(self) -> None:
        self.world.forgets()

    @rule(silent=st.booleans())
    def the_head_is_out_of_reach(self, silent: bool) -> None:
        self.world.silent = silent

    @rule(kind=st.sampled_from(["Service", "NetworkPolicy"]))
    def somebody_deletes_what_pods_find_each_other_by(self, kind: str) -> None:
        self.world.others.pop((kind, "first-trainer"), None)

    @rule(works=st.booleans())
    def kuberay_is_away_for_a_while(self, works: bool) -> None:
        self.world.kuberay_works = works

    @rule()
    def kuberay_comes_or_goes(self) -> None:
        world = self.world
        world.kuberay = not world.kuberay
        if not world.kuberay:  # its kind takes all objects with it
            world.clusters = {}
            world.pods = {
                name: replace(pod, deleting=True, grace_s=930) if pod.cluster else pod
                for name, pod in world.pods.items()
            }

    # Time, people, objects

    @rule(seconds=st.sampled_from([1, 4, 10, 61, 400, 1300, 2000]))
    def time_passes(self, seconds: int) -> None:
        self.world.now += timedelta(seconds=seconds)

    @rule(suspend=st.booleans())
    def somebody_suspends_or_resumes(self, suspend: bool) -> None:
        run = self.world.run
        self.world.run = run.model_copy(update={"spec": run.spec.model_copy(update={"suspend": suspend})})

    @rule(there=st.booleans())
    def objects_come_and_go(self, there: bool) -> None:
        self.world.missing = () if there else ("Secret tokens",)

    @rule(ready=st.booleans())
    def the_policy_flips(self, ready: bool) -> None:
        if self.world.pool.exists:
            self.world.pool = replace(self.world.pool, ready=ready, reason="WarmingUp", message="0 of 1")

    @rule(code=st.sampled_from([0, 0, 0, 0, 1]))
    def the_preparation_ends(self, code: int) -> None:
        prepare = self.world.prepare
        if prepare.exists and not prepare.complete:
            self.world.prepare = replace(prepare, complete=code == 0, failed=code != 0)

    @rule()
    def what_is_deleted_is_gone(self) -> None:
        world = self.world
        for pod in [each for each in world.pods.values() if each.deleting]:
            world.goes(pod)
        world.kuberay_acts()
        if world.pool.deleting:
            world.pool = PolicyOf()

    # Pods

    def alike(self, index: int) -> list[PodOf]:
        """The head, or the others, as far as they have not ended."""
        found = self.world.pods.values()
        return [pod for pod in found if (pod.index == 0) == (index == 0) and not pod.over]

    def change(self, index: int, **words: Any) -> None:
        for pod in self.alike(index):
            self.world.pods[pod.name] = replace(pod, **words)

    def replaces(self, pod: PodOf) -> bool:
        """Whether a head is one that another one of its attempt was there before."""
        return bool(pod.cluster) and self.heads.get(pod.attempt, pod.uid) != pod.uid

    def trains(self) -> list[PodOf]:
        """The head that runs, if it is the first one of its attempt."""
        return [pod for pod in self.alike(0) if pod.ready and not self.replaces(pod)]

    @rule()
    def pods_run(self) -> None:
        for name, pod in self.world.pods.items():
            if not pod.over:
                if pod.index == 0:
                    self.heads.setdefault(pod.attempt, pod.uid)
                started = pod.started or self.world.now
                self.world.pods[name] = replace(pod, phase="Running", ready=True, started=started)

    @rule(index=st.sampled_from([0, 0, 1]), code=EXITS, reported=st.booleans(), seen=st.booleans())
    def a_pod_ends(self, index: int, code: int, reported: bool, seen: bool = True) -> None:
        for pod in self.alike(index):
            words: dict[str, Any] = {"phase": "Ended", "exit_code": code, "suspended": code == 85}
            report = self.world.report(self.step, None, attempt=pod.attempt, **words)
            if index == 0 and self.replaces(pod):  # it only repeats, or says that the first one is gone
                lost = self.world.report(self.step, None, attempt=pod.attempt, phase="Ended", exit_code=1)
                report = self.words.get(pod.attempt, lost)
            elif index == 0 and reported:  # who says something has run, and no other head comes before it
                self.heads.setdefault(pod.attempt, pod.uid)
                self.words.setdefault(pod.attempt, report)
            told = report if index == 0 and (reported or self.replaces(pod)) else None
            ended = {"phase": "Failed", "ready": False, "finished": self.world.now, "report": told}
            self.world.pods[pod.name] = replace(pod, exit_code=told.exit_code if told else code, **ended)
        if seen:
            self.works()

    @rule(index=st.sampled_from([0, 1]))
    def a_pod_is_deleted(self, index: int) -> None:
        self.change(index, deleting=True)

    @rule(index=st.sampled_from([0, 1]))
    def a_pod_is_lost(self, index: int) -> None:
        for pod in [each for each in self.world.pods.values() if (each.index == 0) == (index == 0)]:
            self.world.goes(pod)
        self.world.kuberay_acts()

    @precondition(lambda self: self.trains())
    @rule(saves=st.booleans())
    def the_head_makes_a_step(self, saves: bool) -> None:
        self.step += 1
        self.world.head_says = self.world.report(self.step, self.step if saves else None)
        self.world.heard = True

    # What always holds

    @invariant()
    def there_is_one_attempt_at_most(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        attempts = {pod.attempt for pod in world.pods.values()}
        assert len(attempts) <= 1
        status = world.run.status
        assert all(attempt <= status.attempt for attempt in attempts)
        assert status.attempt >= self.attempt
        self.attempt = status.attempt
        if self.over is not None:
            assert (status.phase, status.attempt) == (self.over.phase, self.over.attempt)
        elif status.phase in OVER:
            self.over = status

    def teardown(self) -> None:
        """From wherever it is, a run comes to its end if nothing is in its way any more."""
        world = getattr(self, "world", None)
        if world is None:
            return
        world.missing, world.heard, world.silent = (), True, False
        world.kuberay = world.kuberay_works = True
        run = world.run
        world.run = run.model_copy(update={"spec": run.spec.model_copy(update={"suspend": False})})
        for _ in range(60):
            self.works()
            self.what_is_deleted_is_gone()
            self.the_preparation_ends(0)
            self.pods_run()
            if world.seen().pods:
                self.a_pod_ends(0, 0, True)
            world.now += timedelta(seconds=400)
        assert world.phase in OVER
        assert world.pods == {}
        assert world.clusters == {}
        assert world.others == {}
        assert world.pool == PolicyOf()
        assert world.prepare == PrepareOf()


AnyWorld.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyWorld = AnyWorld.TestCase
