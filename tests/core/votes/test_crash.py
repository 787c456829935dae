"""A server that is killed while people vote: what was acknowledged is there, and nothing twice."""

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from compeer_core.votes.store import VoteStore
from tests.core.votes.made_up import fought

ROOT = Path(__file__).resolve().parents[3]
CLIENTS = 8

SERVER = """
import os, sys, threading
from compeer_core.votes.store import VoteStore
from tests.core.votes.made_up import fought

store = VoteStore(sys.argv[1])

def client(number):
    voter = f"voter {number}"
    while True:
        battle = fought(store, voter)
        os.write(1, f"asked {battle} {voter}\\n".encode())
        store.cast(battle, voter, "first", token="t")
        os.write(1, f"acknowledged {battle} {voter}\\n".encode())

threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
"""


def killed_after(url, acknowledged):
    """Run a server with eight clients, kill it; return who asked for what, and what was granted."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, url], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    said = {"asked": {}, "acknowledged": {}}
    for line in server.stdout:
        word, battle, voter = line.rstrip("\n").split(" ", 2)
        said[word][battle] = voter
        if len(said["acknowledged"]) == acknowledged:
            server.send_signal(signal.SIGKILL)
    server.stdout.close()
    assert server.wait(timeout=30) == -signal.SIGKILL
    return said["asked"], said["acknowledged"]


def test_votes_that_were_acknowledged_survive_a_kill_and_none_is_there_twice(url):
    asked, acknowledged = killed_after(url, acknowledged=60)

    assert set(acknowledged.values()) == {f"voter {number}" for number in range(CLIENTS)}
    with VoteStore(url) as store:
        there = Counter(vote.battle_id for vote in store.votes())
        assert set(acknowledged) <= set(there) <= set(asked)
        assert set(there.values()) == {1}

        # whoever got no answer asks again
        for battle, voter in asked.items():
            assert store.cast(battle, voter, "first", token="t").number == 1
        assert Counter(vote.battle_id for vote in store.votes()) == Counter(asked.keys())


@pytest.mark.slow
def test_a_vote_is_acknowledged_within_50_ms_at_20_votes_a_second(url):
    seconds = 10.0
    waited: list[float] = []
    with VoteStore(url) as store:
        battles = {
            f"voter {number}": [fought(store, f"voter {number}") for _ in range(25)]
            for number in range(CLIENTS)
        }
        begun = time.monotonic() + 0.2

        def client(number):
            # every 0.4 s one vote of each, so 20 in a second, spread evenly
            for turn, battle in enumerate(battles[f"voter {number}"]):
                due = begun + (turn * CLIENTS + number) / 20
                time.sleep(max(0.0, due - time.monotonic()))
                asked = time.monotonic()
                store.cast(battle, f"voter {number}", "first", note="x" * 200, dwell_ms=5000)
                waited.append(time.monotonic() - asked)

        clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()

    waited.sort()
    middle, late, last = waited[len(waited) // 2], waited[int(len(waited) * 0.99)], waited[-1]
    assert len(waited) == 20 * seconds
    figures = f"median {middle * 1e3:.0f} ms, 99 % {late * 1e3:.0f} ms, worst {last * 1e3:.0f} ms"
    assert late < 0.05, figures
