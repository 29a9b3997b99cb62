"""The launcher's and the processes' small parts: worker pool, run directories, watchdog, collections, lag."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from phalanx.core.errors import ConfigError
from phalanx.runtime import collector, heartbeat, launch, workers
from phalanx.runtime.collector import IdleCollector
from phalanx.runtime.heartbeat import Heartbeat, SilentWorkers
from phalanx.runtime.run_dir import remove_stale, run_directory
from phalanx.runtime.watchdog import Watchdog
from phalanx.runtime.workers import WorkerPool
from phalanx.server.housekeeping import Histogram, Housekeeper


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


class Process:
    def __init__(self):
        self.returncode = None
        self.signals = []

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        self.signals.append(number)

    def wait(self, timeout_s):
        raise subprocess.TimeoutExpired("worker", timeout_s)

    def kill(self):
        self.returncode = -9


class Pool:
    """A pool of processes that end when told to, and a clock."""

    def __init__(self, monkeypatch, count, silence_s=0.0):
        self.clock = Clock()
        monkeypatch.setattr(workers, "time", self.clock)
        monkeypatch.setattr(heartbeat, "time", self.clock)
        self.started: list[tuple[int, int, Process]] = []
        self.dead: list[int] = []
        self.beats: dict[int, int] = {}
        self.pool = WorkerPool(count, self.start, self.dead.append, beat=self.beats.get, silence_s=silence_s)

    def start(self, slot, number):
        process = Process()
        self.started.append((slot, number, process))
        return process

    def live(self):
        return [(slot, number) for slot, number, process in self.started if process.returncode is None]

    def kill(self, slot, code=-9):
        next(p for s, _, p in self.started if s == slot and p.returncode is None).returncode = code

    def after(self, seconds):
        self.clock.now += seconds
        return self.pool.check()


def test_a_dead_worker_is_told_of_and_replaced_under_a_new_number(monkeypatch):
    pool = Pool(monkeypatch, 2)
    assert pool.live() == [(0, 0), (1, 1)] and pool.after(1) is None
    pool.kill(0)
    assert pool.after(0) is None and pool.dead == [0] and pool.live() == [(1, 1)]
    assert pool.after(0.05) is None and len(pool.started) == 2
    assert pool.after(0.06) is None and pool.live() == [(1, 1), (0, 2)]
    pool.kill(1)
    pool.after(0)
    pool.after(1)
    assert pool.dead == [0, 1] and pool.live() == [(0, 2), (1, 3)]
    pool.kill(0)
    pool.kill(1)
    pool.after(0)
    assert pool.dead == [0, 1, 2, 3]
    assert len(pool.pool.processes) == 2


def test_a_worker_that_keeps_dying_is_waited_for_longer_and_given_up(monkeypatch):
    pool = Pool(monkeypatch, 2)
    waits = []
    for _ in range(5):
        pool.kill(0)
        assert pool.after(1) is None
        died_s = pool.clock.now
        while (0, pool.started[-1][1]) not in pool.live():
            assert pool.after(0.1) is None
        waits.append(round(pool.clock.now - died_s, 1))
    assert waits == sorted(waits) and waits[0] <= 0.2 and waits[-1] >= 1.5
    pool.kill(0)
    assert pool.after(1) == -9


@pytest.mark.parametrize("code", [0, 1, -9])
def test_a_worker_that_was_told_to_end_is_no_error(monkeypatch, caplog, code):
    """Operators are told to alarm on "ended with code"; what SIGTERM ended has finished its requests."""
    caplog.set_level("INFO")
    pool = Pool(monkeypatch, 1)
    pool.kill(0, code)
    assert pool.after(0) is None and pool.dead == [0]
    assert pool.after(0.2) is None and pool.live() == [(0, 1)]
    (record,) = caplog.records
    assert record.levelname == ("ERROR" if code else "INFO")
    assert (f"ended with code {code}" in record.message) == ("aborting" in record.message) == bool(code)


def test_deaths_far_apart_are_not_added_up(monkeypatch):
    pool = Pool(monkeypatch, 1)
    for _ in range(20):
        pool.kill(0)
        assert pool.after(31) is None
        assert pool.after(0.2) is None
        assert len(pool.live()) == 1


def test_a_worker_that_stands_still_is_killed_and_replaced(monkeypatch):
    pool = Pool(monkeypatch, 2, silence_s=3)

    def turn(*alive, seconds=0.5):
        for number in alive:
            pool.beats[number] = pool.beats.get(number, 0) + 1
        assert pool.after(seconds) is None

    for _ in range(20):
        turn()  # before the first beat it loads, for however long
    for _ in range(20):
        turn(0, 1)
    for _ in range(6):
        turn(0)
    assert pool.live() == [(0, 0), (1, 1)]
    turn(0, 1)
    turn(0, seconds=60)  # the launcher was stopped for a minute: a second of silence at most
    turn(0, 1)
    for _ in range(7):
        turn(0)
    assert pool.dead == [1]
    turn(0)
    assert pool.live() == [(0, 0), (1, 2)]
    assert [process.signals for _, _, process in pool.started] == [[], [signal.SIGUSR1], []]
    for _ in range(20):
        turn(0)  # the successor is loading
    assert pool.live() == [(0, 0), (1, 2)]


def test_without_a_watchdog_nobody_is_killed(monkeypatch):
    pool = Pool(monkeypatch, 1, silence_s=0)
    pool.beats[0] = 1
    for _ in range(5000):
        assert pool.after(1) is None
    assert pool.live() == [(0, 0)]


def test_a_heartbeat_is_seen_in_another_process(tmp_path):
    theirs, ours = Heartbeat(tmp_path, 3), Heartbeat(tmp_path, 3)
    assert ours.last() is None
    theirs.beat()
    first = ours.last()
    assert first is not None and Heartbeat(tmp_path, 4).last() is None
    os.utime(tmp_path / "alive-3", ns=(1, 1))
    theirs.beat()
    assert ours.last() > 1
    ours.remove()
    assert ours.last() is None and not list(tmp_path.iterdir())
    tmp_path.rmdir()
    theirs.beat()  # the directory has gone before the worker


def test_silent_workers_are_told_of_once(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    silent = SilentWorkers(3)

    def turn(*workers, seconds=1.0):
        clock.now += seconds
        silent.heard(workers)
        return silent.look()

    assert turn(0, 1) == [] and turn(0) == [] and turn(0) == []
    assert turn(0) == [1] and turn(0) == []
    assert turn(0, 1) == [] and turn(0, 1) == []  # it is back
    assert turn(seconds=600) == []  # the engine itself was stopped, or had a long step
    assert turn(0, 1, seconds=600) == []
    silent.ended(1)
    assert [turn() for _ in range(5)] == [[], [], [0], [], []]
    assert turn(0, seconds=0.1) == []


def test_run_directory_is_private_and_removed(tmp_path):
    with run_directory(tmp_path) as path:
        assert path.parent == tmp_path and path.stat().st_mode & 0o777 == 0o700
        (path / "engine.ipc").touch()
        assert remove_stale(tmp_path) == 0 and path.exists()
        with run_directory(tmp_path) as other:
            assert path.exists() and other != path
    assert list(tmp_path.iterdir()) == []


def test_run_directory_that_cannot_be_made(tmp_path):
    with pytest.raises(ConfigError, match=r"run directory in .*/missing: No such file"):
        with run_directory(tmp_path / "missing"):
            pass


def test_what_a_killed_launcher_left_is_removed_at_the_next_start(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from phalanx.runtime.run_dir import run_directory\n"
        "with run_directory(Path(sys.argv[1])) as path:\n"
        "    (path / 'engine.ipc').touch()\n    print('there', flush=True)\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        (left,) = tmp_path.iterdir()
        assert remove_stale(tmp_path) == 0 and left.exists()
        process.kill()
        process.wait()
    with run_directory(tmp_path) as path:
        assert list(tmp_path.iterdir()) == [path] and path != left


def test_stale_removal_touches_nothing_else(tmp_path):
    (tmp_path / "phalanx-notes").mkdir()
    (tmp_path / "phalanx-run-file").write_text("x")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "phalanx-run-link").symlink_to(elsewhere)
    locked = tmp_path / "phalanx-run-locked"
    locked.mkdir()
    lock = os.open(locked, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    before = sorted(p.name for p in tmp_path.iterdir())
    assert remove_stale(tmp_path) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    os.close(lock)
    assert remove_stale(tmp_path) == 1 and not locked.exists()


class Waits:
    """A watchdog's waits, each a pair: how long it lasts (None: as asked for), and what is called then."""

    def __init__(self, clock, script):
        self.clock, self.script = clock, iter(script)

    def wait(self, wait_s):
        lasted_s, then = next(self.script, (None, None))
        if then is None:
            return True
        self.clock.now += wait_s if lasted_s is None else lasted_s
        then()
        return False


@pytest.mark.parametrize("timeout_s", [1.0, 8.0, 300.0])
def test_watchdog_counts_what_it_saw_and_not_what_the_clock_says(monkeypatch, timeout_s):
    clock, ends_s, looks_s = Clock(), [], []
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setattr(Watchdog, "_end", lambda self: ends_s.append(clock.now))
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    dog = Watchdog(timeout_s, lambda: looks_s.append(clock.now))
    dog.alive()
    count = round(timeout_s / min(timeout_s / 20, 0.5))
    still, turns, stopped = (None, bool), (None, dog.alive), (3600.0, bool)
    almost = [still] * (count - 4)
    # Stopped for an hour after a turn; where it had stood still for a while; again and again.
    script = [turns, stopped, turns, *almost, stopped, turns, *[stopped, turns] * 50, *almost]
    dog._closed = Waits(clock, script)
    dog._watch()
    assert ends_s == [] and len(looks_s) == 1 + len(script)
    began_s = clock.now
    dog._closed = Waits(clock, [turns, *[still] * (count + 1)])
    dog._watch()
    assert ends_s[0] - began_s == pytest.approx(timeout_s + dog._wait_s, abs=1.1 * dog._wait_s)


def test_watchdog_ends_a_process_that_does_not_turn_and_says_where():
    code = (
        "import time\nfrom phalanx.runtime.watchdog import Watchdog\n"
        "dog = Watchdog(2.0)\n"
        "for _ in range(25):\n    dog.alive()\n    time.sleep(0.1)\n"
        "print('turned', flush=True)\n"
        "time.sleep(250)\n"
    )
    for _ in range(5):  # again, if the loop was held up for longer than the dog waits
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        if done.stdout:
            break
    assert done.returncode == 1 and done.stdout == "turned\n"
    assert "has not turned for 2 s" in done.stderr and 'File "<string>", line 8' in done.stderr


def test_watchdog_leaves_a_process_alone_that_was_stopped_and_goes_on():
    """As `docker pause` and SIGSTOP do it: the clock has gone on, the process has not."""
    code = (
        "import time\nfrom phalanx.runtime.watchdog import Watchdog\n"
        "dog = Watchdog(3.0)\n"
        "while True:\n    dog.alive()\n    print(time.monotonic(), flush=True)\n    time.sleep(0.05)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            time.sleep(5)  # longer than the dog waits
            process.send_signal(signal.SIGCONT)
            went_on_s = time.monotonic()
            turned_s = 0.0
            while turned_s < went_on_s + 1:
                line = process.stdout.readline()
                assert line, "it was ended"
                turned_s = float(line)
        finally:
            process.kill()


@pytest.mark.parametrize("timeout_s", [0.0, 0.3])
def test_watchdog_that_is_off_or_closed_never_fires(timeout_s):
    code = (
        "import sys, time\nfrom phalanx.runtime.watchdog import Watchdog\n"
        "dog = Watchdog(float(sys.argv[1]))\ndog.alive()\ndog.close()\ntime.sleep(0.8)\n"
    )
    command = [sys.executable, "-c", code, str(timeout_s)]
    # Again, if the machine stood still between the two calls.
    assert any(subprocess.run(command, timeout=300).returncode == 0 for _ in range(5))


class Cycle:
    def __init__(self):
        self.me = self


@pytest.fixture
def manual_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_garbage_is_collected_at_idle_and_only_then(monkeypatch, manual_gc):
    clock = Clock()
    monkeypatch.setattr(collector, "time", clock)
    idle = IdleCollector()
    seen = weakref.ref(Cycle())
    idle.worked()
    clock.now += 0.5
    idle.idle()
    assert seen() is not None
    clock.now += 0.6
    idle.idle()
    assert seen() is None
    seen = weakref.ref(Cycle())
    clock.now += 1000
    idle.idle()  # nothing was done since: the heap is not walked again and again
    assert seen() is not None
    idle.worked()
    assert seen() is None  # long due


def test_a_process_that_is_never_idle_collects_too(monkeypatch, manual_gc):
    clock = Clock()
    monkeypatch.setattr(collector, "time", clock)
    collected_s = []
    monkeypatch.setattr(collector.gc, "collect", lambda: collected_s.append(clock.now))
    busy = IdleCollector()
    for _ in range(3000):
        clock.now += 1
        busy.worked()
    assert collected_s == [1900, 2800, 3700]


def test_histogram_counts_each_value_once():
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 7.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1] and histogram.count == 5
    assert histogram.sum == 11.5 and histogram.max == 7.0


def test_housekeeper_measures_a_loop_that_was_held_up():
    async def hold() -> Histogram:
        housekeeper = Housekeeper(is_idle=lambda: True, watchdog_timeout_s=0)
        housekeeper.start()
        await asyncio.sleep(0.12)
        time.sleep(0.3)
        await asyncio.sleep(0.12)
        housekeeper.close()
        count = housekeeper.loop_lag_s.count
        await asyncio.sleep(0.12)
        assert housekeeper.loop_lag_s.count == count
        return housekeeper.loop_lag_s

    lag = asyncio.run(hold())
    assert lag.count >= 2 and lag.max >= 0.2
    assert sum(lag.counts[8:]) >= 1  # beyond 0.2 s


@pytest.mark.parametrize(("limit", "is_warned"), [(300, True), (100_000, False)])
def test_few_files_are_told(monkeypatch, caplog, limit, is_warned):
    monkeypatch.setattr(launch, "raise_file_limit", lambda: limit)
    launch.check_files(256)
    assert ("ulimit -Hn" in caplog.text) == is_warned


def test_too_few_files_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "raise_file_limit", lambda: 100)
    with pytest.raises(ConfigError, match="at most 100 files"):
        launch.check_files(1)
