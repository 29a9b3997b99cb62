"""What the load client costs: events per second and client core, against senders on other cores.

    python benchmarks/client_load.py --streams 4096 --events 64 --rate 40000
    python benchmarks/client_load.py --streams 4096 --events 512 --rate 0 --client-processes 8 --senders 8

Nobody is answered before all streams are open; then each sender writes one event of --event-bytes to each of
its streams in turn, --rate events a second over all senders (0: as fast as they can). The client is the one
of `bench serving` with all its accounting; its figures are computed and checked afterwards. Prints one JSON
line last. Each sender is bound to a core of its own, from the last one on, and the client to the others; with
fewer cores than that nothing is bound.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import resource
import select
import socket
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import numpy as np

from phalanx.bench.backends import Flavor
from phalanx.bench.check import check_possible
from phalanx.bench.client_load import judge_client
from phalanx.bench.fleet import Load, run_fleet
from phalanx.bench.metrics import Asked, compute_metrics
from phalanx.bench.target import Target

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Words:
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[str]:
        return text.split()


def chunk(number: int, num_bytes: int) -> bytes:
    """One event in the transfer coding; its JSON is padded to `num_bytes` of event."""
    body = {"text": "w", "meta_info": {"id": "", "completion_tokens": number, "prompt_tokens": 8}}
    short = len(b"data: " + json.dumps(body).encode() + b"\n\n")
    body["meta_info"]["id"] = "x" * max(0, num_bytes - short)
    event = b"data: " + json.dumps(body).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def raise_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def send_all(
    rank: int,
    listener: socket.socket,
    channel: Connection,
    all_open: Barrier,
    args: argparse.Namespace,
    cores: set[int],
) -> None:
    """A sender process: accept its share, wait for all requests of all senders, then write in turn."""
    os.sched_setaffinity(0, cores)
    raise_limit()
    streams = accept_all(listener, len(range(rank, args.streams, args.senders)))
    chunks = [chunk(n, args.event_bytes) for n in range(1, args.events + 1)]
    rate = args.rate / args.senders
    all_open.wait()
    began = time.perf_counter()
    for number, data in enumerate([HEAD + chunks[0], *chunks[1:-1], chunks[-1] + END]):
        for place, stream in enumerate(streams):
            # Pace every 64 events: a burst of all streams at once would measure the queue, not the client.
            if rate and place % 64 == 0:
                due = began + (number * len(streams) + place) / rate
                while (wait := due - time.perf_counter()) > 0:
                    time.sleep(wait)
            stream.sendall(data)
    channel.send(time.perf_counter() - began)


def accept_all(listener: socket.socket, count: int) -> list[socket.socket]:
    """Take `count` connections from a listener that other processes share, and read their requests."""
    poll, streams, ready = select.epoll(), {}, []
    listener.setblocking(False)
    poll.register(listener, select.EPOLLIN)
    while len(ready) < count:
        for fileno, _ in poll.poll():
            if fileno == listener.fileno():
                try:
                    stream, _ = listener.accept()
                except BlockingIOError:
                    continue  # another sender took it
                if len(streams) + 1 == count:
                    poll.unregister(listener)
                stream.setblocking(True)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                streams[stream.fileno()] = stream
                poll.register(stream, select.EPOLLIN)
            else:
                assert streams[fileno].recv(4096).endswith(b"}")  # a small request comes in one piece
                ready.append(streams[fileno])
    return ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=4096)
    parser.add_argument("--events", type=int, default=64, help="events of each stream, 2 at least")
    parser.add_argument("--event-bytes", type=int, default=200)
    parser.add_argument("--rate", type=float, default=40000.0, help="events/s over all streams; 0: no pacing")
    parser.add_argument("--client-processes", type=int, default=1)
    parser.add_argument("--senders", type=int, default=1)
    args = parser.parse_args()
    if not (1 <= args.senders <= args.streams and args.events >= 2):
        parser.error("1 to --streams senders, and 2 events or more")
    cores = sorted(os.sched_getaffinity(0))
    bound = len(cores) > args.senders
    raise_limit()
    listener = socket.create_server(("127.0.0.1", 0), backlog=8192)
    spawn = mp.get_context("spawn")
    all_open = spawn.Barrier(args.senders)
    here, there = zip(*(mp.Pipe() for _ in range(args.senders)), strict=True)
    senders = [
        spawn.Process(
            target=send_all,
            args=(i, listener, there[i], all_open, args, {cores[-1 - i]} if bound else set(cores)),
            daemon=True,
        )
        for i in range(args.senders)
    ]
    for sender in senders:
        sender.start()
    os.sched_setaffinity(0, set(cores[: -args.senders]) if bound else set(cores))
    target = Target("127.0.0.1", listener.getsockname()[1])
    n = args.streams
    load = Load(target, [target.wire_request("/generate", b"{}")] * n, np.zeros(n), None, Flavor.NATIVE, True)
    record = run_fleet(load, args.client_processes)
    send_s = max(channel.recv() for channel in here)
    for sender in senders:
        sender.join(10)
    asked = Asked(np.ones(n, np.int64), np.ones(n, np.int64), record.due, record.sent, np.empty(0))
    metrics = compute_metrics(
        record.outcomes, asked, record.ended - record.began, Words(), began=record.began
    )
    check_possible(metrics)
    times = np.concatenate([outcome.event_times for outcome in record.outcomes])
    # Without the ramp: all connections were opened before the first event.
    window = tuple(np.quantile(times, [0.05, 0.95]))
    num_events = int(np.count_nonzero((times >= window[0]) & (times <= window[1])))
    client = judge_client(record.processes, window)
    shares = [process.cpu_share for process in client.processes]
    span = window[1] - window[0]
    # A burst that is over within two ticks of the event loop has no CPU figures.
    used = None if None in shares else sum(shares)
    result = {
        "streams": n,
        "client_processes": len(client.processes),
        "senders": args.senders,
        "rate_asked": args.rate,
        "cores": len(cores),
        "completed": metrics.num_completed,
        "failures": metrics.failures,
        "events": len(times),
        "output_tokens": metrics.total_output,
        "sender_events_per_s": n * args.events / send_s,
        "events_per_s": num_events / span,
        "client_cores": used,
        "busiest_share": used and max(shares),
        "us_per_event": used and used * span / num_events * 1e6,
        "events_per_s_per_core": num_events / span / used if used else None,
        "lag_p99_ms": client.worst("window_lag_p99_ms"),
        "client_bottleneck": client.bottleneck,
        "load_average": os.getloadavg()[0],
    }
    for name, value in result.items():
        print(f"{name:<24} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
