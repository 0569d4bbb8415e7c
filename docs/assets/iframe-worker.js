// The search of the site when it is opened as files: browsers refuse a Worker from file://, so its script runs in
// a hidden frame with the same interface (postMessage, message events).
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      const script = new URL(url, location.href).href;
      this.ready = new Promise((done) => {
        const name = "worker" + Math.random().toString(36).slice(2);
        window[name] = (data) => {
          const event = new MessageEvent("message", { data });
          this.dispatchEvent(event);
          if (this.onmessage) this.onmessage(event);
        };
        this.frame.srcdoc =
          `<script>window.postMessage = (data) => parent[${JSON.stringify(name)}](data);` +
          `window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((ok) => {` +
          `const tag = document.createElement("script"); tag.src = url; tag.onload = ok;` +
          `document.head.appendChild(tag); })), Promise.resolve());</scr` + `ipt><script src="${script}"></scr` + `ipt>`;
        this.frame.onload = () => done(this.frame.contentWindow);
      });
      document.body.appendChild(this.frame);
    }
    postMessage(data) {
      this.ready.then((frame) => frame.dispatchEvent(new frame.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
