// News from the server about the list and about runs, over one socket per page that comes back by itself.

export function watch(asked, hear) {
  const lamp = document.getElementById("lamp");
  let socket,
    closed = false,
    wait = 500,
    version = asked.version || 0,
    missed = false;
  const show = (word, text) => {
    lamp.className = `lamp ${word}`;
    lamp.textContent = text;
    lamp.title = text;
  };

  function open(again) {
    socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/api/live`);
    socket.onopen = () => {
      // Closing a socket that is not open yet would be an error in the console.
      if (closed) return socket.close();
      wait = 500;
      // Another server counts its versions from the beginning.
      if (again) version = 0;
      show("on", "live");
      socket.send(JSON.stringify({ ...asked, version }));
      // What happened while nobody listened is not told: the page looks at everything once.
      if (again) hear({ again: true });
    };
    socket.onmessage = (message) => {
      const news = JSON.parse(message.data);
      if (news.list) version = news.list.version;
      // A page that nobody sees draws nothing; it looks once when it is seen again.
      if (document.hidden) missed = true;
      else hear(news);
    };
    socket.onclose = () => {
      if (closed) return;
      show("off", "not connected");
      setTimeout(async () => {
        // A server that was started again has another token, which any page of it brings along.
        await fetch("/").catch(() => {});
        if (!closed) open(true);
      }, wait);
      wait = Math.min(wait * 2, 10000);
    };
  }
  const seen = () => {
    if (!document.hidden && missed) {
      missed = false;
      hear({ again: true });
    }
  };
  document.addEventListener("visibilitychange", seen);
  open(false);
  return () => {
    closed = true;
    if (socket.readyState === WebSocket.OPEN) socket.close();
    document.removeEventListener("visibilitychange", seen);
  };
}
