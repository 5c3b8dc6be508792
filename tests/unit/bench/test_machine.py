"""What is read from the kernel about the machine."""

import platform

from tests.bench.machine import facts, memory_gib, processor


def test_the_processor_is_the_model_of_the_first() -> None:
    assert processor("processor\t: 0\nmodel name\t: A: B 3\nmodel name\t: C\n") == "A: B 3"


def test_without_a_model_the_architecture_stands_for_it() -> None:
    assert processor("processor\t: 0\n") == platform.machine()


def test_memory_is_in_gib() -> None:
    assert memory_gib("MemTotal:       25165824 kB\nMemFree:  1 kB\n") == 24.0


def test_the_machine_is_described_without_its_name() -> None:
    described = dict(facts())
    assert {"date", "command", "processor", "kernel"} <= set(described)
    assert platform.node() not in described.values()
