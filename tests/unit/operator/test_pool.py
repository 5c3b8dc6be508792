"""The counts of a pool's status: from its broker, or without one from its pods."""

from agentfly.api.poolstatus import MemberCounts, ResourcePoolStatus
from agentfly_operator.plan.facts import PodFacts
from agentfly_operator.plan.pool import Plan, low_since, plan_pool
from agentfly_operator.plan.seen import PoolSeen
from agentfly_operator.plan.wanted import Wanted, read_pool
from tests.unit.operator.make import NOW, SETTLED, ago, answers, pool, report, seen, silent, wanted

# 2. counts ---------------------------------------------------------------------------------------------


def status_of(what: Wanted, of: PoolSeen) -> ResourcePoolStatus:
    found = plan_pool(what, of, NOW).status
    assert found is not None
    return found


def test_counts_are_those_of_the_broker() -> None:
    broker = answers(
        ready=5, leased=4, starting=3, resetting=2, stopping=1, quarantined={"m-1": "dirty"}, outdated=2
    )
    status = status_of(wanted(), seen(broker, pods=PodFacts(total=40, ready=40)))
    assert status.members == MemberCounts(
        total=16, ready=9, free=5, leased=4, starting=3, resetting=2, quarantined=1, outdated=2
    )


def test_members_are_counted_as_pods_while_the_broker_is_silent() -> None:
    status = status_of(wanted(), seen(silent(90, ready=5), pods=PodFacts(total=4, ready=3)))
    assert status.members == MemberCounts(total=4, ready=3, starting=1)
    assert (status.queue, status.rates, status.reset, status.images) == (None, None, None, None)


def test_one_lost_answer_changes_no_counts() -> None:
    status = status_of(wanted(), seen(silent(3, ready=5), pods=PodFacts(total=1)))
    assert status.members is not None
    assert status.members.free == 5


def test_status_says_what_a_member_should_be_and_how_its_pods_are_found() -> None:
    status = status_of(wanted(generation=7), seen(answers()))
    assert status.observed_generation == 7
    assert status.selector == "agentfly.dev/component=member,agentfly.dev/pool=shell"
    assert status.revision is not None
    assert len(status.revision) == 16
    other = status_of(read_pool(pool(container={"image": "other"})), seen(answers()))
    assert other.revision not in (None, status.revision)


def test_a_pool_without_pods_has_no_selector() -> None:
    api = read_pool(
        pool(
            type="ExternalAPI", scope="Global", capacity={"max": 1}, container=None,
            externalAPI={"baseUrl": "https://judge.example/v1"},
        )
    )  # fmt: skip
    assert api.problem == ""
    assert api.selector is None


def test_jobs_are_bounded_and_those_that_wait_most_come_first() -> None:
    shares = {f"job-{n:02}": {"pending": n, "leased": 1} for n in range(20)}
    shares |= {"": {"pending": 99, "leased": 5}}
    queue = plan_pool(
        wanted(), seen(answers(queued=3, oldest_wait_s=14.4, by_share=shares)), NOW
    ).status.queue
    assert queue is not None
    assert (queue.pending, queue.oldest_seconds) == (3, 14)
    assert [job.job for job in queue.by_job[:3]] == ["-", "job-19", "job-18"]
    assert len(queue.by_job) == 16
    assert queue.by_job[0].share == "0.2"


# 3. numbers that move ----------------------------------------------------------------------------------


def test_numbers_that_always_move_are_rounded() -> None:
    broker = answers(hit_ratio=0.97314, acquire_p99_s=0.18149, clean_ratio=0.9961, oldest_wait_s=1234.5)
    status = status_of(wanted(), seen(broker))
    assert status.rates is not None
    assert (status.rates.warm_hit_percent, status.rates.reset_clean_percent) == ("97", "100")
    assert status.rates.acquire_p99_milliseconds == 180
    assert status.queue is not None
    assert status.queue.oldest_seconds == 1200


def test_rates_that_are_not_known_are_left_out() -> None:
    status = status_of(wanted(), seen(answers()))
    assert status.to_json()["rates"] == {}


def test_images_are_counted_where_acquires_name_them() -> None:
    images = {"a:1": 2, "b:1": 1}
    assert status_of(wanted(), seen(answers(images=images))).images is None
    per_acquire = read_pool(pool(images={"policy": "PerAcquire"}))
    status = status_of(per_acquire, seen(answers(images=images)))
    assert status.images is not None
    assert status.images.resident == 2


def test_the_reset_method_is_told_in_the_words_of_the_spec() -> None:
    broker = answers(reset_method="overlay-shared-pid", reset_reason="overlay: mount: proc")
    reset = status_of(wanted(), seen(broker)).reset
    assert reset is not None
    assert (reset.method, reset.reason) == ("OverlaySharedPID", "overlay: mount: proc")


def test_low_since_is_kept_until_nothing_is_missing() -> None:
    assert low_since(wanted(min=2), report(ready=1), None, NOW) == NOW
    assert low_since(wanted(min=2), report(ready=1), ago(9), NOW) == ago(9)
    assert low_since(wanted(min=2), report(ready=2), ago(9), NOW) is None


# 6. the operator's own restart


def test_who_has_only_begun_to_ask_says_nothing_of_a_pool_that_has_a_status() -> None:
    begun = silent(4, ever=False, error="")
    assert plan_pool(wanted(), seen(begun, before=SETTLED), NOW) == Plan(None, wake_at=ago(-1))
    assert plan_pool(wanted(), seen(begun), NOW).status is not None
    assert plan_pool(wanted(), seen(silent(5, ever=False), before=SETTLED), NOW).status is not None


# Status as the API server keeps it ---------------------------------------------------------------------


def test_a_status_is_json_with_times_in_seconds() -> None:
    told = status_of(wanted(), seen(answers())).to_json()
    assert told["conditions"][0]["lastTransitionTime"] == "2026-11-30T12:00:00Z"
    assert told["observedGeneration"] == 1
