"""A client in Go, made as Go's developers make it: generated, from the descriptors that the server's reflection gives.

It is compiled with Debian's packages, as Go's own registry may be out of reach.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

__all__ = ["build", "version"]

PACKAGES: Final = (
    "golang-go", "protobuf-compiler", "protoc-gen-go", "protoc-gen-go-grpc", "golang-google-grpc-dev",
    "golang-github-golang-protobuf-1-5-dev",
)  # fmt: skip
LIBRARIES: Final = Path("/usr/share/gocode")
CASES: Final = Path(__file__).with_name("go_cases.go")


def version() -> str:
    """The version of Go's package for gRPC.

    Raises:
        RuntimeError: a package is missing.
    """
    source = LIBRARIES / "src/google.golang.org/grpc/version.go"
    tools = ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
    if not source.is_file() or not all(map(shutil.which, tools)):
        raise RuntimeError(f"expected {', '.join(tools)} and {source}; on Debian: apt-get install {' '.join(PACKAGES)}")
    return source.read_text().partition('Version = "')[2].partition('"')[0]


def build(address: str, folder: Path) -> Path:
    """Generate and compile the client.

    Args:
        address: of the server.
        folder: for what is made; must not exist.

    Returns:
        The program.

    Raises:
        RuntimeError: a command failed.
    """
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        files = [database.FindFileContainingSymbol("inference.GRPCInferenceService")]
        for file in files:
            files += [database.FindFileByName(name) for name in file.dependency]
    package = folder / "src" / "client"
    package.mkdir(parents=True)
    shutil.copy(CASES, package)
    (folder / "descriptors").write_bytes(FileDescriptorSet(file=files).SerializeToString())
    names = [file.name for file in files]
    options = [f"--{tool}_opt=M{name}=client/inference" for tool in ("go", "go-grpc") for name in names]
    _run(folder, "protoc", "--descriptor_set_in=descriptors", "--go_out=src", "--go-grpc_out=src", *options, *names)
    _run(folder, "go", "build", "-o", "cases", "client")
    return folder / "cases"


def _run(folder: Path, *command: str) -> None:
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": f"{folder}:{LIBRARIES}", "GOFLAGS": ""}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{command[0]} failed: {ended.stderr[-3000:]}")
