"""The client of sandboxd: run commands and move files in a leased sandbox; lease and reset it."""

from agentfly.sandbox.client import SandboxAdmin, SandboxClient
from agentfly.sandbox.errors import SandboxError, SandboxLeaseLost, SandboxUnreachable
from agentfly.sandbox.job import Job
from agentfly.sandbox.meeting import Met, Owner, meet, meet_all
from agentfly.sandbox.types import Endpoint, ExecResult, Health, Holding, Piece, ResetReport

__all__ = [
    "Endpoint",
    "ExecResult",
    "Health",
    "Holding",
    "Job",
    "Met",
    "Owner",
    "Piece",
    "ResetReport",
    "SandboxAdmin",
    "SandboxClient",
    "SandboxError",
    "SandboxLeaseLost",
    "SandboxUnreachable",
    "meet",
    "meet_all",
]
