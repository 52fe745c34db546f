// Live updates of the list and of runs, over one websocket per page that reconnects.

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
      // A restarted server counts its versions from 0.
      if (again) version = 0;
      show("on", "live");
      socket.send(JSON.stringify({ ...asked, version }));
      // Changes during the disconnection are not sent: the page reloads everything once.
      if (again) hear({ again: true });
    };
    socket.onmessage = (message) => {
      const news = JSON.parse(message.data);
      if (news.list) version = news.list.version;
      // A hidden page draws nothing; it is refreshed when it becomes visible.
      if (document.hidden) missed = true;
      else hear(news);
    };
    socket.onclose = () => {
      if (closed) return;
      show("off", "not connected");
      setTimeout(async () => {
        // A restarted server has another token, which any of its pages sets.
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
