"""What the tests ask of a page in a browser."""

import json


def wait(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 10, poll_frequency=0.02).until(lambda _: condition())


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)",
        selector,
    )


def press(browser, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    chain = ActionChains(browser, duration=0)
    for key in keys:
        chain.send_keys(key)
    chain.perform()


def open_page(browser, url):
    """Open a page afresh, and wait until it has drawn itself."""
    browser.get_log("browser"), browser.get_log("performance")
    browser.get("about:blank")
    browser.get(url)
    wait(browser, lambda: browser.execute_script("return document.documentElement.dataset.ready"))


def assert_quiet(browser, url):
    """Check that nothing was said on the console of a page, or asked of anyone but its own host."""
    assert browser.get_log("browser") == []
    events = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    asked = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    # Other documents: the browser's own, when it starts.
    own = {one["request"]["url"] for one in asked if one["documentURL"].startswith(url)}
    assert own and all(each.startswith((url, f"blob:{origin(url)}")) for each in own), own
    assert not browser.execute_script("return window.alerted")


def origin(url):
    """Return the origin of a page as a browser names it; that of a file is null."""
    return "null" if url.startswith("file:") else "/".join(url.split("/")[:3])
