"""Which secrets the broker of a namespace must be able to read.

Guarantees:
1. Secrets that pools take the keys of external APIs from, and no others: what pods take from secrets, kubelet
   reads for them.
2. A pool that cannot be read names none.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def credentials_of(pools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of secrets, sorted, each once.

    Args:
        pools: ResourcePools as the API server returned them.
    """
    named: set[str] = set()
    for pool in pools:
        api = pool.get("spec", {}).get("externalAPI") or {}
        for credential in api.get("credentials") or ():
            reference = credential.get("secretKeyRef") or {}
            if reference.get("name"):
                named.add(str(reference["name"]))
    return tuple(sorted(named))
