// The player in the Python process, behind a socket: messages out, pictures in.

export class Live {
  // `told` has hello(facts), frame(header, pictures), trouble(text, fatal), state(word, good).
  constructor(told) {
    this.told = told;
    this.fatal = false;
  }

  open() {
    const place = location.pathname.replace(/\/$/, "");
    const address = new URL(`${place}/walk`, location.href);
    address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    this.socket = new WebSocket(address);
    this.socket.binaryType = "arraybuffer";
    this.socket.onmessage = (event) => this.hear(event.data);
    this.socket.onclose = () => {
      if (this.fatal) return;
      this.told.state("the player is gone; is it still running?", false);
      setTimeout(() => this.open(), 1500);
    };
  }

  send(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  async hear(data) {
    if (typeof data === "string") return this.read(JSON.parse(data));
    const head = new DataView(data).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, head)));
    let at = 4 + head;
    const pictures = await Promise.all(
      header.pictures.map(async (one) => {
        const blob = new Blob([new Uint8Array(data, at, one.bytes)], { type: one.type });
        at += one.bytes;
        return { kind: one.kind, num: one.num, image: await createImageBitmap(blob) };
      }),
    );
    this.told.frame(header, pictures);
  }

  read(message) {
    if (message.loading) this.told.state(`loading ${message.loading}`, true);
    if (message.hello) this.told.hello(message);
    if (message.trouble) {
      this.fatal = this.fatal || message.fatal === true;
      this.told.trouble(message.trouble, message.fatal === true, message.id);
    }
  }
}
