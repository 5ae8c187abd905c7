// Pages that are opened from the disk may not start workers, and the search of the theme is one. Run its script in a hidden frame
// instead, and pass copies of the messages on. (The theme would load such a script from a network, unless one of this name exists.)
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = data => this.onmessage({ data: structuredClone(data) });
      const script = this.inside.document.createElement("script");
      script.src = url;
      this.ready = new Promise(resolve => script.addEventListener("load", resolve));
      this.inside.document.body.append(script);
    }

    postMessage(data) {
      const message = structuredClone(data);
      this.ready.then(() => this.inside.onmessage({ data: message }));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
