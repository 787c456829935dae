"""The accessibility check finds violations in either colour scheme and restores the page."""

import pytest
from playwright.sync_api import Page

from tests.browser.axe import violations

PAGE = """<!doctype html><html lang="en"><title>A page</title><body class="{scheme}">
<style>body {{ background: #fff }} body.dark {{ background: #000; color: #111 }}</style>
<main id="words"><h1>Faint in the dark</h1></main>"""


@pytest.mark.parametrize("scheme", ["", "dark"])
def test_low_contrast_in_dark_mode_is_found(browser, scheme):
    page: Page = browser.new_page()
    page.set_content(PAGE.format(scheme=scheme))

    (found,) = violations(page, "#words", "#nowhere")

    assert found.startswith("dark: color-contrast: <h1>")
    assert page.locator("body").get_attribute("class") == scheme
    with pytest.raises(AssertionError, match="none of #nowhere"):
        violations(page, "#nowhere")
    page.context.close()
