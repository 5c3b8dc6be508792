import base64
import sys

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from agentfly.resources.errors import ResourceError
from agentfly.resources.runners.kubernetes import Signer

SEED = bytes(range(32))


def test_token_is_a_signature_over_member_and_boot():
    signer = Signer(SEED)
    token = signer.token("pool-0a1b-0", "boot")
    assert "=" not in token
    signature = base64.urlsafe_b64decode(token + "==")
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(signer.public_key))
    public.verify(signature, b"agentfly-admin:pool-0a1b-0:boot")


def test_every_member_and_every_boot_has_its_own():
    signer = Signer(SEED)
    assert len({signer.token("a", "b"), signer.token("a", "c"), signer.token("b", "b")}) == 3
    assert signer.token("a", "b") == Signer(SEED).token("a", "b")


@pytest.mark.parametrize("seed", [b"", b"short", b"x" * 33])
def test_key_of_another_length_is_refused(seed):
    with pytest.raises(ResourceError, match=f"has {len(seed)} bytes") as caught:
        Signer(seed)
    assert "agentfly-broker" in caught.value.hints[0]


def test_says_which_package_is_missing(monkeypatch):
    name = "cryptography.hazmat.primitives.asymmetric.ed25519"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ResourceError, match="cryptography"):
        Signer(SEED)
