# SPDX-License-Identifier: Apache-2.0
"""The page of a report in a real browser: quiet, alone, drawn, and it answers the mouse."""

import json
import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from hyper_parallel.core.optimizer.hardware_presets import PRESETS
from hyper_parallel.reports import build_report
from hyper_parallel.reports.html import write_html
from tests.planned import S0, S1, R, mesh_of, plan_of, transformer

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PLOTS = ("load", "timeline", "traffic", "scaling")

pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="needs a browser: apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    folder = tmp_path_factory.mktemp("page")
    mesh = mesh_of(2, 4, 4)
    params = transformer(mesh, (R, S0, S1), num_layers=8, width=1024)
    plan = plan_of(params, bucket_bytes=1 << 23)
    names = ("dp_replicate", "dp_shard", "tp")
    report = build_report(plan, PRESETS["h200"], title="GPT & co. <1B>", axis_names=names)
    write_html(report, folder / "report.html")
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1280,2200",
        f"--user-data-dir={folder / 'profile'}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        driver.get((folder / "report.html").as_uri())
        WebDriverWait(driver, 20).until(
            lambda d: len(d.find_elements(By.CSS_SELECTOR, ".js-plotly-plot .main-svg")) >= 8
        )
        yield driver
    finally:
        driver.quit()


def requests(driver: webdriver.Chrome) -> list[str]:
    """Addresses of everything that the page has asked for; not what the empty first tab did."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [a["request"]["url"] for a in asked if not a["documentURL"].startswith("chrome://")]


def test_the_page_is_quiet_and_asks_for_nothing_but_itself(browser: webdriver.Chrome) -> None:
    asked = requests(browser)
    assert [url for url in asked if url.endswith("report.html")]
    assert [url for url in asked if not url.startswith(("file://", "data:", "blob:"))] == []
    assert browser.get_log("browser") == []
    assert browser.title == "GPT & co. <1B>: Muon step on h200"


@pytest.mark.parametrize("name", PLOTS)
def test_each_plot_is_drawn_inside_its_column(name: str, browser: webdriver.Chrome) -> None:
    plot = browser.find_element(By.ID, f"plot-{name}")
    marks = ".points path, .scatterlayer path.js-line"
    assert len(plot.find_elements(By.CSS_SELECTOR, marks)) >= 3
    section = plot.find_element(By.XPATH, "./ancestor::section")
    drawn = plot.find_element(By.CSS_SELECTOR, ".main-svg")
    assert drawn.rect["width"] <= section.rect["width"] + 1
    assert drawn.rect["width"] >= 0.8 * section.rect["width"]
    titles = plot.find_elements(By.CSS_SELECTOR, ".xtitle, .ytitle")
    assert titles
    assert all(title.text for title in titles)


def test_no_two_labels_of_an_axis_overlap(browser: webdriver.Chrome) -> None:
    for name in PLOTS:
        for kind in ("xtick", "ytick"):
            labels = browser.find_elements(By.CSS_SELECTOR, f"#plot-{name} .{kind} text")
            boxes = [label.rect for label in labels if label.text]
            for i, a in enumerate(boxes):
                for b in boxes[i + 1 :]:
                    apart = (
                        a["x"] + a["width"] <= b["x"] + 1
                        or b["x"] + b["width"] <= a["x"] + 1
                        or a["y"] + a["height"] <= b["y"] + 3
                        or b["y"] + b["height"] <= a["y"] + 3
                    )
                    assert apart, (name, kind, a, b)


def test_a_bar_tells_what_it_is(browser: webdriver.Chrome) -> None:
    bar = browser.find_elements(By.CSS_SELECTOR, "#plot-load .points path")[5]
    ActionChains(browser).move_to_element(bar).perform()
    hover = WebDriverWait(browser, 10).until(
        lambda d: d.find_element(By.CSS_SELECTOR, "#plot-load .hoverlayer .hovertext")
    )
    assert "rank 5" in hover.text
    assert "matrices" in hover.text


def test_a_click_in_the_legend_hides_a_curve(browser: webdriver.Chrome) -> None:
    lines = "#plot-scaling .scatterlayer path.js-line"
    before = len(browser.find_elements(By.CSS_SELECTOR, lines))
    toggle = browser.find_element(By.CSS_SELECTOR, "#plot-scaling .legendtoggle")
    ActionChains(browser).move_to_element(toggle).click().perform()
    WebDriverWait(browser, 10).until(
        lambda d: len(d.find_elements(By.CSS_SELECTOR, lines)) == before - 1
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_in_dark(scheme: str, browser: webdriver.Chrome) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    # The plots are painted anew a moment later. 4.5 is from WCAG 2.2, section 1.4.3.
    WebDriverWait(browser, 10).until(lambda d: min(contrasts(d)) >= 4.5)
    paper = browser.execute_script(
        "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (luminance(paper) < 0.1) == (scheme == "dark")


def contrasts(driver: webdriver.Chrome) -> list[float]:
    """Contrast of the kinds of text on the page with its background."""
    paper, *inks = driver.execute_script(
        "const f = (e, p) => getComputedStyle(e)[p].match(/\\d+/g).slice(0, 3).map(Number);"
        "return [f(document.body, 'backgroundColor'), f(document.body, 'color'),"
        " f(document.querySelector('.note'), 'color'),"
        " f(document.querySelector('#plot-load .xtitle'), 'fill')];"
    )
    pairs = [sorted((luminance(paper), luminance(ink))) for ink in inks]
    return [(high + 0.05) / (low + 0.05) for low, high in pairs]


def luminance(color: list[int]) -> float:
    """Relative luminance, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance."""
    parts = [c / 255 for c in color]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
