"""What operators copy: settings that resolve, metrics that exist, paths that are there."""

import re
from pathlib import Path

import yaml

from halogen_core.config import resolve

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def test_the_settings_resolve():
    config = resolve({}, file=DEPLOY / "halogen.toml", environment={"HOME": "/tmp"})
    assert config.server.metrics_port == 9091
    assert str(config.server.api_key_file) == "/etc/halogen/keys"
    grace = int(re.search(r"TimeoutStopSec=(\d+)", (DEPLOY / "halogen.service").read_text())[1])
    assert grace > config.server.drain_timeout_s


def test_alerts_watch_metrics_that_exist():
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    known = set(re.findall(r"halogen_\w+", page))
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    used = {name for rule in rules for name in re.findall(r"halogen_\w+", rule["expr"])}
    assert used <= known
    assert len(used) >= 6
    assert all(rule["annotations"]["summary"] for rule in rules)


def test_proxy_and_scraper_know_the_ports():
    assert "server 127.0.0.1:8000;" in (DEPLOY / "nginx.conf").read_text()
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert jobs[0]["static_configs"][0]["targets"] == ["127.0.0.1:9091"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["halogen"]
    assert compose["ports"] == ["8000:8000"]


def test_the_container_copies_what_is_there():
    text = (DEPLOY / "Dockerfile").read_text()
    for path in re.findall(r"plugins/\w+", text):
        assert (ROOT / path / "pyproject.toml").is_file(), path
