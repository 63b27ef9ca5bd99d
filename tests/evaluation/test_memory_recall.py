"""Recall and precision of memory search on a labelled set: 60 memories, 30 queries, of which 8 match nothing.

Both are computed over the first five results. Precision counts the queries that must find nothing: it is 1 for a
query that rightly returns nothing, and 0 for one that returns anything else.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from perdure.worker.memory import Embedder, HashingEmbedder, HybridStore, SqliteBackend, new_memory
from perdure.worker.memory.relevance import calibrated_floor
from perdure.worker.memory.static_embedder import WordLlamaEmbedder

pytestmark = pytest.mark.evaluation

MEMORIES: Final = """
deploy      Deploys are frozen on Fridays and before public holidays
rollback    A release is rolled back when the error rate exceeds 2 percent
migration   Database migrations need a way back and a review by two engineers
postgres    The primary database is PostgreSQL 16 in Frankfurt
redis       Sessions are stored in Redis with a lifetime of 30 days
backup      Backups run every night at 3:00 and are kept for 90 days
restore     The last restore test took 47 minutes
oncall      The on-call engineer is reached through PagerDuty
incident    The outage of May was caused by an expired TLS certificate
cert        Certificates are renewed automatically 20 days before they expire
eu          The customer Acme wants its data to stay in the European Union
eu-not      The customer Globex does not need its data to stay in the European Union
acme-seats  Acme has licences for 250 employees
acme-bill   Acme pays its invoices within 14 days
globex      Globex is invoiced in US dollars
initech     Initech cancelled its contract because of the slow support
support     Support tickets of paying customers are answered within 4 hours
sla         The guaranteed availability of the service is 99.9 percent
price       The professional plan costs 49 euros per month
discount    Charities receive a discount of 30 percent
trial       The free trial ends after 21 days
refund      Money is returned within 30 days of the purchase
limit       The API accepts 100 requests per second and customer
timeout     Calls of the payment provider time out after 10 seconds
retry       Failed webhooks are sent again five times
idempotent  Payments carry an idempotency key, so that no customer is charged twice
upload      Uploaded files may have at most 25 megabytes
virus       Attachments are scanned for malware before they are stored
python      The backend is written in Python 3.11
frontend    The web client is written in TypeScript with React
tests       Pull requests are merged only when all tests pass
style       Code is formatted with ruff
lang        The user prefers answers in German
brief       The user wants short answers without introductions
mail        The user does not want to be called, only e-mail
tz          The user works in the time zone of Tokyo
name        The user wants to be addressed as Doctor Tanaka
dark        The user has chosen the dark theme
vegetarian  The user eats no meat and no fish
allergy     The user is allergic to peanuts
seat        The user books window seats on flights
hotel       The user stays at hotels with a gym
budget      Business trips may cost at most 1,500 euros
train       For distances below 500 kilometres the user takes the train
boss        Expenses are approved by Maria Lopez
office      The headquarters moved from Munich to Vienna in 2024
remote      Employees may work from home three days a week
holiday     Staff have 28 days of paid vacation
parking     Visitors park in the garage under the building
wifi        The guest network has a new password every Monday
meeting     The planning meeting takes place on Tuesdays at 10:00
standup     Daily stand-ups last 15 minutes
report      The quarterly report is due on the fifth of the month
audit       The security audit is carried out by an external firm every spring
gdpr        Personal data is deleted 6 months after a contract ends
logs        Log files are kept for two weeks
secret      Passwords and keys are in the vault, never in the repository
mfa         All employees log in with a second factor
laptop      Laptops are replaced after four years
model       Summaries are written by the small language model to save costs
"""

QUERIES: Final = """
deploy            may we ship a release on Friday?
rollback          when do we revert a deployment?
migration         rules for changing the database schema
postgres          which SQL server do we use?
backup            how often is the data saved at night?
incident          why was the service down in May?
eu                where must Acme's data be stored?
eu-not            does Globex insist on data in the EU?
acme-seats        number of Acme users
initech           why did Initech leave?
support           how fast do we reply to tickets?
price             monthly price of the professional plan
refund            can a buyer get the money back?
limit             rate limit of the API
idempotent        how do we avoid double charges?
upload            largest size of an attachment
lang              in which language should I reply?
mail              may I phone the user?
vegetarian,allergy  what food must the user avoid?
office            in which city is the head office?
logs              retention of log files
mfa,secret        how are logins and passwords protected?
-                 capital of Peru
-                 recipe for apple pie
-                 who won the football world cup?
-                 distance from the earth to the moon
-                 symptoms of the flu in children
-                 lyrics of a love song
-                 how do whales sleep?
-                 what is it about?
"""
FIRST: Final = 5


def rows(text: str) -> list[tuple[str, str]]:
    return [(one, rest.strip()) for one, _, rest in (line.partition(" ") for line in text.strip().splitlines())]


@dataclass
class Figures:
    recall: float = 0.0
    precision: float = 0.0
    empty: int = 0


async def evaluate(folder: Path, embedder: Embedder | None, floor: float | None = None) -> Figures:
    store = HybridStore(SqliteBackend(folder / f"{time.monotonic_ns()}.sqlite3"), embedder)
    await store.open()
    ids = {name: (await store.add(new_memory(text))).id for name, text in rows(MEMORIES)}
    assert await store.count() == 60
    names = {one: name for name, one in ids.items()}
    figures, asked = Figures(), rows(QUERIES)
    for labels, query in asked:
        wanted = set() if labels == "-" else set(labels.split(","))
        found = [names[one.memory.id] for one in await store.search(query, limit=FIRST, floor=floor)]
        hits = len(wanted.intersection(found))
        figures.recall += hits / len(wanted) if wanted else 0.0
        figures.precision += hits / len(found) if found else float(not wanted)
        figures.empty += not wanted and not found
    await store.close()
    figures.recall /= sum(labels != "-" for labels, _ in asked)
    figures.precision /= len(asked)
    return figures


def speed(embedder: Embedder) -> float:
    """Return texts per second."""
    texts = [text for _, text in rows(MEMORIES)] * 5
    started = time.perf_counter()
    embedder.embed(texts)
    return len(texts) / (time.perf_counter() - started)


def test_recall_and_precision_of_memory_search(tmp_path: Path) -> None:
    found: dict[str, Figures] = {}
    print(f"\n{'search':<28}{'recall@5':>10}{'precision':>11}{'nothing for 8':>15}{'dimension':>11}{'texts/s':>9}")
    embedders = {"words": None, "words, hashing": HashingEmbedder(), "words, wordllama": WordLlamaEmbedder()}
    for label, embedder in embedders.items():
        one = found[label] = asyncio.run(evaluate(tmp_path, embedder))
        size = "-" if embedder is None else str(embedder.dimension)
        rate = "-" if embedder is None else f"{speed(embedder):.0f}"
        print(f"{label:<28}{one.recall:>10.2f}{one.precision:>11.2f}{one.empty:>13}/8{size:>11}{rate:>9}")
    print("\nfloor of wordllama, by its effect:")
    for floor in (0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4):
        one = asyncio.run(evaluate(tmp_path, WordLlamaEmbedder(), floor))
        print(f"  {floor:.2f}: recall {one.recall:.2f}, precision {one.precision:.2f}, nothing for {one.empty}/8")

    class Unknown:
        """An embedder without a floor of its own."""

        name, dimension = "unknown", 256
        embed = staticmethod(WordLlamaEmbedder().embed)

    print(f"  calibrated without it: {asyncio.run(calibrated_floor(Unknown())):.3f}")
    words, meaning = found["words"], found["words, wordllama"]
    assert meaning.recall > words.recall
    assert meaning.precision > 0.5
    assert meaning.empty >= 6
    assert words.empty >= 7
