// News from the server about the list and about runs, over one socket per page that comes back by itself.

export function watch(asked, hear) {
  const lamp = document.getElementById("lamp");
  let socket, closed = false, wait = 500, version = asked.version || 0;
  const show = (word, text) => { lamp.className = `lamp ${word}`; lamp.textContent = text; lamp.title = text; };

  function open(again) {
    socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/api/live`);
    socket.onopen = () => {
      wait = 500;
      show("on", "live");
      socket.send(JSON.stringify({ ...asked, version }));
      // What happened while nobody listened is not told: the page looks at everything once.
      if (again) hear({ again: true });
    };
    socket.onmessage = (message) => {
      const news = JSON.parse(message.data);
      if (news.list) version = news.list.version;
      hear(news);
    };
    socket.onclose = () => {
      if (closed) return;
      show("off", "not connected");
      setTimeout(() => !closed && open(true), wait);
      wait = Math.min(wait * 2, 10000);
    };
  }
  open(false);
  return () => { closed = true; socket.close(); };
}
