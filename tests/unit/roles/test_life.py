import pytest

from agentfly.roles.life import Ended, Verdict, after_attempt

CASES = {
    "success ends the run": (Ended(0, False, True), 2, 3, Verdict("Succeeded", 2)),
    "1. a suspension that was asked for is no failure": (
        Ended(85, True, True),
        2,
        3,
        Verdict("Suspended", 2),
    ),
    "2. a failure without a new checkpoint counts": (
        Ended(1, False, False),
        0,
        3,
        Verdict("Restarting", 1, 10),
    ),
    "2. a failure after a new checkpoint does not count": (
        Ended(1, False, True),
        3,
        3,
        Verdict("Restarting", 3, 10),
    ),
    "2. one failure more than the limit fails the run": (Ended(-9, False, False), 3, 3, Verdict("Failed", 4)),
    "2. a limit of zero fails at once": (Ended(1, False, False), 0, 0, Verdict("Failed", 1)),
    "3. the pause doubles": (Ended(1, False, False), 2, 9, Verdict("Restarting", 3, 40)),
    "3. the pause has a bound": (Ended(1, False, False), 20, 99, Verdict("Restarting", 21, 360)),
}


@pytest.mark.parametrize(("ended", "failures", "limit", "want"), CASES.values(), ids=CASES.keys())
def test_after_attempt(ended: Ended, failures: int, limit: int, want: Verdict) -> None:
    assert after_attempt(ended, failures, limit) == want
