"""The channels of a replica, and the streams that go over them (`headwater.wire.parcel`)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncGenerator, Callable
from typing import Final

from headwater.runtime.stream_control import StreamControl
from headwater.wire.arrays import Array
from headwater.wire.parcel import LEASE_S, PARCEL_BYTES, PARCEL_WINDOW, ChannelNote, Entry, encode_parcel
from headwater.wire.report import CallNote

__all__ = ["StreamChannels"]

PARCEL_EVERY_S: Final = 0.002
"""Seconds for which frames gather after a parcel; each parcel costs CPU time in Triton and in its Python backend."""
LEASE_LOOKS: Final = 10
"""How often a lease is checked until it expires."""

logger = logging.getLogger(__name__)


class _Channel:
    """The channel of a worker, used in a single event loop.

    It exists from the first call that names it, and holds back its frames until it is opened.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.streams: dict[str, StreamControl] = {}
        self.is_closed = False
        self._on_close = contextlib.ExitStack()
        self._entries: list[Entry] = []
        self._sent = 0
        """Number of parcels sent."""
        self._acknowledged = 0
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._looks_left = LEASE_LOOKS
        """Number of checks of the lease until it expires."""

    def watch(self, pid: int) -> None:
        """Close the channel when the worker's process ends or its lease expires. There is no other sign of the worker's
        end: Triton reports a cancellation only to a model that keeps polling for it."""
        if pid < 0:
            self._look_later()
            return
        try:
            fd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno == errno.ESRCH:
                self.close()
            else:
                logger.warning("gateway worker %d can't be watched; if it ends, its streams run on: %s", pid, error)
            return
        loop = asyncio.get_running_loop()
        self._on_close.callback(os.close, fd)
        self._on_close.callback(loop.remove_reader, fd)
        loop.add_reader(fd, self.close)

    def renew(self) -> None:
        """Note that the worker has sent a message, which renews its lease."""
        self._looks_left = LEASE_LOOKS

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LEASE_S / LEASE_LOOKS, self._look)

    def _look(self) -> None:
        """Check the lease. Expiry is measured in checks, not in time: messages that the worker sent while this process
        was paused, or while a callable blocked the loop, must be read first."""
        self._looks_left -= 1
        if self._looks_left > 0:
            self._look_later()
        else:
            logger.warning("a gateway worker on another machine was not heard for %g s: its streams end", LEASE_S)
            self.close()

    def add(self, stream: str, frame: Array | None) -> None:
        """Queue a frame of a stream, or the end of the stream (None)."""
        if not self.is_closed:
            self._entries.append((stream, None if frame is None else frame.reshape(-1).data))
            self._news.set()

    def acknowledge(self, note: ChannelNote) -> None:
        """Note the parcels that the worker has received, and the frames that its readers have taken."""
        self._acknowledged = max(self._acknowledged, min(note.parcels, self._sent))
        self._news.set()
        for name, (frames, size_bytes) in note.taken.items():
            stream = self.streams.get(name)
            if stream is not None:
                stream.take(frames, size_bytes)

    async def parcels(self) -> AsyncGenerator[Array, None]:
        """The parcels to send, until the channel is closed."""
        loop = asyncio.get_running_loop()
        not_before_s = 0.0
        try:
            while not self.is_closed:
                if not self._entries or self._sent - self._acknowledged >= PARCEL_WINDOW:
                    self._news.clear()
                    await self._news.wait()
                elif (left_s := not_before_s - loop.time()) > 0:
                    await asyncio.sleep(left_s)
                else:
                    self._sent += 1
                    yield self._parcel()
                    not_before_s = loop.time() + PARCEL_EVERY_S
        finally:  # also if a parcel could not be sent
            self.close()

    def close(self) -> None:
        """Close the channel, and cancel its streams: its worker is gone, has a later channel, or can't be reached."""
        self._on_close.close()
        if self._timer is not None:
            self._timer.cancel()
        self.is_closed = True
        self._entries = []
        self._news.set()
        for stream in self.streams.values():
            stream.cancel()

    def _parcel(self) -> Array:
        count = size_bytes = 0
        for _, frame in self._entries:
            count += 1
            size_bytes += 0 if frame is None else len(frame)
            if size_bytes >= PARCEL_BYTES:
                break
        entries, self._entries = self._entries[:count], self._entries[count:]
        return encode_parcel(entries)


class StreamChannels:
    """The channels of a replica: one channel for each gateway worker."""

    def __init__(self) -> None:
        self._channels: dict[int, _Channel] = {}
        """Channels by the worker's process id; a worker on another machine has a negative number instead."""
        self._streams: dict[str, StreamControl] = {}
        """Running streams by name."""
        self._relays: set[asyncio.Task[None]] = set()

    def answers(
        self, note: CallNote, frames: Callable[[StreamControl], AsyncGenerator[Array, None]]
    ) -> AsyncGenerator[Array, None] | None:
        """The answers to a call: its frames or, if its note opens a channel, the channel's parcels. None if the call
        itself gets no answer.

        Args:
            note: the call's note.
            frames: computes the call's frames. If they go over a channel, the call ends before they are computed, so
                they must not need the memory of the call's tensors.
        """
        name, channel = note.stream, note.channel
        if note.cancel:
            if note.cancel in self._streams:
                self._streams[note.cancel].cancel()
            return None
        if channel is not None and channel.opens:
            return self._channel(channel).parcels()
        if channel is not None and not name:
            self._channel(channel).acknowledge(channel)
            return None
        stream = StreamControl(name)
        if not name:
            return frames(stream)
        self._streams.setdefault(name, stream)
        if channel is None:
            return self._direct(stream, frames(stream))
        task = asyncio.get_running_loop().create_task(self._relay(self._channel(channel), stream, frames(stream)))
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)
        return None

    async def _direct(self, stream: StreamControl, frames: AsyncGenerator[Array, None]) -> AsyncGenerator[Array, None]:
        """Yield a stream's frames as answers to its call, without flow control."""
        try:
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    yield frame
                    del frame  # free the memory: the next frame may take long
        finally:
            _remove(self._streams, stream)

    async def _relay(self, channel: _Channel, stream: StreamControl, frames: AsyncGenerator[Array, None]) -> None:
        """Send a stream's frames over a channel as they are made."""
        channel.streams.setdefault(stream.name, stream)
        if channel.is_closed:
            stream.cancel()
        try:
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    stream.frames += 1
                    stream.bytes += frame.size
                    channel.add(stream.name, frame)
                    del frame  # free the memory: the next frame may take long
                    if stream.is_full and not stream.has_turn:
                        await stream.capacity()
                        if stream.is_cancelled:  # don't wait for the next frame, which may take long
                            break
        finally:
            channel.add(stream.name, None)
            _remove(channel.streams, stream)
            _remove(self._streams, stream)

    def _channel(self, note: ChannelNote) -> _Channel:
        """The channel with this number, made if necessary; a closed one if the worker already has a later channel."""
        channel = self._channels.get(note.pid)
        if channel is not None and channel.number == note.number:
            channel.renew()
            return channel
        new = _Channel(note.number)
        if channel is not None and channel.number > note.number:
            new.close()
            return new
        if channel is not None:
            channel.close()
        for pid in [pid for pid, worker_channel in self._channels.items() if worker_channel.is_closed]:
            del self._channels[pid]
        new.watch(note.pid)
        self._channels[note.pid] = new
        return new


def _remove(streams: dict[str, StreamControl], stream: StreamControl) -> None:
    """Remove a stream that has ended, unless its name was taken: then an earlier stream has it."""
    if streams.get(stream.name) is stream:
        del streams[stream.name]
