"""The client of sandboxd: run commands and move files in a leased sandbox; lease and reset it."""

from agentfly.sandbox.client import SandboxAdmin, SandboxClient
from agentfly.sandbox.errors import SandboxError, SandboxLeaseLost, SandboxUnreachable
from agentfly.sandbox.job import Job
from agentfly.sandbox.types import Endpoint, ExecResult, Health, Piece, ResetReport

__all__ = [
    "Endpoint",
    "ExecResult",
    "Health",
    "Job",
    "Piece",
    "ResetReport",
    "SandboxAdmin",
    "SandboxClient",
    "SandboxError",
    "SandboxLeaseLost",
    "SandboxUnreachable",
]
