// A page that is opened from disk cannot start a worker. The search then runs in a hidden frame of the page.
if (location.protocol === "file:") {
  const message = (data) => new MessageEvent("message", { data: structuredClone(data) });
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: source, onload: resolve, onerror: reject });
          inside.document.body.appendChild(script);
        });
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      inside.postMessage = (data) => this.onmessage?.(message(data));
      this.ready = load(url);
    }

    postMessage(data) {
      const sent = message(data);
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(sent));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
