// Backend of the live page: a WebSocket to the Python process.

export class Live {
  // `handlers` has hello(facts), frame(header, images), error(text, fatal), state(word, good).
  constructor(handlers) {
    this.handlers = handlers;
    this.fatal = false;
  }

  open() {
    const path = location.pathname.replace(/\/$/, "");
    const address = new URL(`${path}/socket`, location.href);
    address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    this.socket = new WebSocket(address);
    this.socket.binaryType = "arraybuffer";
    this.socket.onmessage = (event) => this.receive(event.data);
    this.socket.onclose = () => {
      if (this.fatal) return;
      this.handlers.state("connection lost; is the server still running?", false);
      setTimeout(() => this.open(), 1500);
    };
  }

  send(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  async receive(data) {
    if (typeof data === "string") return this.read(JSON.parse(data));
    const head = new DataView(data).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, head)));
    let at = 4 + head;
    const images = await Promise.all(
      header.images.map(async (one) => {
        const blob = new Blob([new Uint8Array(data, at, one.bytes)], { type: one.type });
        at += one.bytes;
        return { kind: one.kind, num: one.num, image: await createImageBitmap(blob) };
      }),
    );
    this.handlers.frame(header, images);
  }

  read(message) {
    if (message.loading) this.handlers.state(`loading ${message.loading}`, true);
    if (message.hello) this.handlers.hello(message);
    if (message.error) {
      this.fatal = this.fatal || message.fatal === true;
      this.handlers.error(message.error, message.fatal === true, message.id);
    }
  }
}
