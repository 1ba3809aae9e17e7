// Pages that are opened as files: browsers allow them no workers, so the worker that answers the
// search runs in a hidden frame instead. Served pages keep the browser's own workers.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const receive = (kind, detail) => this.dispatchEvent(new MessageEvent(kind, detail));
      inside.postMessage = (data) => setTimeout(() => receive("message", { data }));
      inside.importScripts = async (...scripts) => {
        for (const one of scripts) await load(inside, new URL(one, url));
      };
      this.started = load(inside, url).catch((error) => receive("error", { data: error }));
      this.inside = inside;
    }

    postMessage(data) {
      this.started.then(() =>
        this.inside.dispatchEvent(new MessageEvent("message", { data }))
      );
    }
  };

  function load(inside, url) {
    return new Promise((resolve, reject) => {
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`cannot load ${url}`));
      inside.document.head.append(script);
    });
  }
}
