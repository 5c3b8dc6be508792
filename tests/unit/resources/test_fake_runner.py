"""The fake runner keeps the contract of the real ones: what is tested with it holds for them."""

import pytest

from agentfly.resources.spec import ContainerSpec, ModelServiceSpec
from tests.unit.resources.harness import FakeRunner
from tests.unit.resources.runner_contract import RunnerContract


class TestFakeContainer(RunnerContract):
    @pytest.fixture
    def runner(self):
        return FakeRunner()

    @pytest.fixture
    def spec(self):
        return ContainerSpec()

    def left(self, runner):
        return runner.existing


class TestFakeModelService(TestFakeContainer):
    exclusive = False

    @pytest.fixture
    def runner(self):
        return FakeRunner("model-service", shared=True)

    @pytest.fixture
    def spec(self):
        return ModelServiceSpec(model="m", max_model_len=8)
