"""A real browser, driven through the pipe that Chromium has for that; no package is needed."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WATCHED = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


class Browser:
    """Opens pages one after the other; `complaints` and `requests` are those of all of them since
    `fresh_page`."""

    def __init__(self, profile: Path, width: int = 1200, height: int = 900) -> None:
        assert CHROMIUM
        to_read, self.commands = os.pipe()
        self.answers, to_write = os.pipe()
        os.set_inheritable(to_read, True)
        os.set_inheritable(to_write, True)

        def at_3_and_4() -> None:
            source, target = os.dup(to_read), os.dup(to_write)
            os.dup2(source, 3)
            os.dup2(target, 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        self.process = subprocess.Popen(
            [CHROMIUM, *options, "about:blank"],
            close_fds=False,
            preexec_fn=at_3_and_4,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self.numbers, self.rest = itertools.count(1), b""
        self.context, self.session = "", ""
        self.fresh_page()

    def fresh_page(self) -> None:
        """An empty page, of a browser that remembers nothing."""
        self.session = ""
        if self.context:
            self.tell("Target.disposeBrowserContext", browserContextId=self.context)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.context = self.tell("Target.createBrowserContext")["browserContextId"]
        where = {"url": "about:blank", "browserContextId": self.context}
        target = self.tell("Target.createTarget", **where)["targetId"]
        attached = self.tell("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.tell(f"{domain}.enable")

    def tell(self, method: str, **params: Any) -> Any:
        """Do something, and wait for its result."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            part = os.read(self.answers, 1 << 20)
            assert part, "the browser has ended"
            self.rest += part
        text, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") in WATCHED:
            self.complaints.append(text.decode())
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message

    def open(self, file: Path, ready: str = "document.readyState === 'complete'") -> None:
        self.tell("Page.navigate", url=file.as_uri())
        self.wait(f"location.href === {json.dumps(file.as_uri())} && ({ready})")

    def wait(self, condition: str) -> None:
        for _ in range(400):
            if self.value(condition):
                return
            time.sleep(0.05)
        raise AssertionError(f"never so: {condition}; {self.complaints}")

    def value(self, script: str) -> Any:
        """Of an expression; None where it makes no sense yet."""
        result = self.tell("Runtime.evaluate", expression=script, returnByValue=True)
        return result["result"].get("value")

    def point(self, selector: str, number: int = 0, click: bool = False) -> None:
        """Move the mouse over what the selector finds, and click there."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{number}];"
            "e.scrollIntoView({block: 'center', inline: 'center'});"
            "const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        self.tell("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                where = {"x": x, "y": y, "button": "left", "clickCount": 1}
                self.tell("Input.dispatchMouseEvent", type=kind, **where)

    def look(self, width: int, dark: bool = False) -> None:
        """As wide as a phone, or in the dark."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.tell("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, file: Path) -> None:
        """Of the whole page."""
        shot = self.tell("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)
