"""Chromium over its debugging pipe: opens pages, runs scripts in them, moves the mouse."""

import json
import os
import shutil
import subprocess
import time

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]


class Browser:
    """One Chromium with one tab; messages of the console and errors gather in `said`."""

    def __init__(self, profile, wait_s=60.0):
        self.wait_s, self.said, self._last, self._rest = wait_s, [], 0, b""
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()

        def on_3_and_4():
            os.dup2(theirs_in, 103)
            os.dup2(theirs_out, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            close_fds=False, preexec_fn=on_3_and_4,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = None
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for end in (self._to, self._from):
            os.close(end)
        self._process.terminate()
        self._process.wait(20)

    def _read(self):
        while b"\0" not in self._rest:
            part = os.read(self._from, 1 << 20)
            if not part:
                raise RuntimeError("Chromium has gone")
            self._rest += part
        one, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(one)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.said.append(params["exceptionDetails"].get("text", "exception"))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.said.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.said.append(params["entry"]["text"])
        return message

    def call(self, method, **params):
        """Send a command and give its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script):
        """Evaluate a script in the page and give its value."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True,
                          awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script):
        """Wait until a script gives something true."""
        end = time.monotonic() + self.wait_s
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)
        return value

    def look(self, width=1280, height=900, dark=False, media=""):
        """Set the window, and how the page is shown: light or dark, on a screen or printed."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def open(self, path):
        """Open a file and wait for its figures; give the seconds to its first paint."""
        self.call("Page.navigate", url=path.as_uri())
        self.until("document.readyState === 'complete' && location.protocol === 'file:'")
        self.until("!document.querySelector('.plot') || document.documentElement.dataset.drawn")
        paint = "performance.getEntriesByName('first-contentful-paint')[0]"
        return self.until(f"({paint} || {{}}).startTime") / 1e3

    def point_at(self, selector, at=0):
        """Move the mouse over the middle of an element, and give the place."""
        self.run(
            f"document.querySelectorAll({selector!r})[{at}].scrollIntoView({{block:'center'}})"
        )
        x, y = self.run(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])"
            f"(document.querySelectorAll({selector!r})[{at}].getBoundingClientRect())"
        )
        for away in (3, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + away, y=y)
        return {"x": x, "y": y}

    def click(self, selector, at=0):
        """Press and release the left button over the middle of an element."""
        place = self.point_at(selector, at) | {"button": "left", "clickCount": 1}
        for event in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=event, **place)

    def said_at(self, selector, script, at=0):
        """Point at an element, again if a figure is drawn anew meanwhile, until a script gives something true."""
        end = time.monotonic() + self.wait_s
        while True:
            self.point_at(selector, at)
            for _ in range(25):
                if value := self.run(script):
                    return value
                time.sleep(0.02)
            assert time.monotonic() < end, f"never true: {script}"
