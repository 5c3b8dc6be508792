"""Addresses that members reach; the section is guarantee 2 of agentfly.api.pods. The rest: test_rules."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.api.pods import BROKER_SECRETS, NOT_PUBLIC, PUBLIC, Egress, is_range, left_out
from agentfly_operator.names import BROKER, CLIENT_SECRET

networks = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).flatmap(
    lambda address: st.integers(0, address.max_prefixlen).map(
        lambda length: ipaddress.ip_network(f"{address}/{length}", strict=False)
    )
)


@pytest.mark.parametrize(
    "cidr", ["0.0.0.0/0", "10.20.0.0/16", "1.2.3.4/32", "::/0", "2001:db8::/32", *NOT_PUBLIC]
)
def test_a_range_in_its_shortest_form_is_one(cidr: str) -> None:
    assert is_range(cidr)


@pytest.mark.parametrize(
    "text",
    ["", "10.0.0.0", "10.1.0.0/8", "10.0.0.0/33", "2001:DB8::/32", "2001:db8:0::/32", "::ffff:0:0/96", "x/8"],
)
def test_other_text_is_none(text: str) -> None:
    assert not is_range(text)


def test_of_everything_all_that_is_not_public_is_left_out() -> None:
    assert [each.cidr for each in PUBLIC] == ["0.0.0.0/0", "::/0"]
    assert sorted(left_out("0.0.0.0/0") + left_out("::/0")) == sorted(NOT_PUBLIC)


@pytest.mark.parametrize(
    ("cidr", "inside"),
    [
        ("10.0.0.0/8", ()),
        ("10.20.0.0/16", ()),
        ("8.0.0.0/5", ("10.0.0.0/8",)),
        ("168.0.0.0/5", ("169.254.0.0/16", "172.16.0.0/12")),
        ("93.184.216.0/24", ()),
        ("fc00::/6", ("fc00::/7", "fe80::/10", "ff00::/8")),
        ("fd00::/8", ()),
    ],
)
def test_what_a_range_names_is_what_it_means(cidr: str, inside: tuple[str, ...]) -> None:
    assert left_out(cidr) == inside


def test_the_secrets_that_no_pods_get_are_the_brokers() -> None:
    assert {BROKER, CLIENT_SECRET} == set(BROKER_SECRETS)


@given(networks)
def test_what_is_left_out_lies_within_and_is_not_all(
    network: ipaddress.IPv4Network | ipaddress.IPv6Network,
) -> None:
    for each in left_out(str(network)):
        part = ipaddress.ip_network(each)
        assert part.network_address in network
        assert part.broadcast_address in network
        assert part != network


def test_a_range_without_ports_has_none_of_its_own() -> None:
    assert Egress(cidr="10.20.0.0/16").ports is None
