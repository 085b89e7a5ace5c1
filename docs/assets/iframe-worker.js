// Browsers start no Worker for a page that was opened from disk. There, this class runs the script of a worker in a hidden frame, so
// that the search works. Zensical looks for a file of this name.
(() => {
  "use strict";

  class FrameWorker extends EventTarget {
    onmessage = null;
    onmessageerror = null;
    onerror = null;
    #frame = document.createElement("iframe");
    #waiting = []; // messages for a script that is still loading

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const scope = this.#frame.contentWindow;
      scope.document.open();
      scope.document.write("<!doctype html><title>Worker</title><body>");
      scope.document.close();
      scope.postMessage = (data) => setTimeout(() => this.#tell(new MessageEvent("message", { data })));
      scope.addEventListener("error", (event) => this.#tell(new ErrorEvent("error", { message: event.message, error: event.error })));
      const script = scope.document.createElement("script");
      script.src = new URL(url, document.baseURI).href;
      script.addEventListener("load", () => {
        const waiting = this.#waiting;
        this.#waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
      script.addEventListener("error", () => this.#tell(new ErrorEvent("error", { message: `cannot load ${script.src}` })));
      scope.document.body.append(script);
    }

    postMessage(data) {
      if (this.#waiting !== null) {
        this.#waiting.push(structuredClone(data));
        return;
      }
      const scope = this.#frame.contentWindow;
      if (scope !== null) {
        scope.dispatchEvent(new scope.MessageEvent("message", { data: structuredClone(data) }));
      }
    }

    terminate() {
      this.#frame.remove();
    }

    #tell(event) {
      if (this.#frame.isConnected) {
        this.dispatchEvent(event);
        this[`on${event.type}`]?.call(this, event);
      }
    }
  }

  if (location.protocol === "file:") {
    window.Worker = FrameWorker;
  }
})();
