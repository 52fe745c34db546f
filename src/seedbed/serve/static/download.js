// A menu that saves a panel as PNG, SVG or CSV. The files are made in the page; nothing is asked of the server.

import { h } from "./dom.js";

// `picture(format, title)` gives the address of an image, `rows()` a table; what is not given is not offered.
export function downloads(title, { picture, rows }) {
  const name = () => (typeof title === "function" ? title() : title);
  const choices = [...(picture ? ["png", "svg"] : []), ...(rows ? ["csv"] : [])];
  const save = async (format) => {
    menu.open = false;
    menu.querySelector("summary").focus();
    if (format === "csv") return keep(new Blob([csv(await rows())], { type: "text/csv" }), `${fileName(name())}.csv`);
    keep(asBlob(await picture(format, name())), `${fileName(name())}.${format}`);
  };
  const menu = h(
    "details",
    {
      className: "menu",
      onkeydown: (event) => event.key === "Escape" && (menu.open = false),
      onfocusout: (event) => menu.contains(event.relatedTarget) || (menu.open = false),
    },
    h("summary", { title: "Download", ariaLabel: "Download" }, "⤓"),
    h(
      "div",
      {},
      choices.map((format) => h("button", { type: "button", onclick: () => save(format) }, format.toUpperCase())),
    ),
  );
  return menu;
}

export const fileName = (title) => title.replace(/[^\w.-]+/g, "_").replace(/^[_.]+|_+$/g, "").slice(0, 120) || "chart";

export function csv(rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

function asBlob(address) {
  const [head, body] = [address.slice(5, address.indexOf(",")), address.slice(address.indexOf(",") + 1)];
  const bytes = head.endsWith(";base64") ? Uint8Array.from(atob(body), (c) => c.charCodeAt(0)) : decodeURIComponent(body);
  return new Blob([bytes], { type: head.split(";")[0] });
}

function keep(blob, file) {
  const link = h("a", { href: URL.createObjectURL(blob), download: file });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// An SVG of the page as an image: its styles are written into it, since the page's sheet stays behind.
export async function drawn(svg, format, background) {
  const copy = svg.cloneNode(true);
  const [all, copies] = [svg.querySelectorAll("*"), copy.querySelectorAll("*")];
  all.forEach((one, i) => {
    const style = getComputedStyle(one);
    for (const key of ["fill", "stroke", "stroke-width", "opacity", "font-family", "font-size", "font-weight", "text-anchor"])
      copies[i].setAttribute(key, style.getPropertyValue(key));
  });
  const { width, height } = svg.viewBox.baseVal;
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  copy.setAttribute("style", `background:${background}`);
  const address = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  if (format === "svg") return address;
  const image = new Image();
  await new Promise((done, fail) => Object.assign(image, { onload: done, onerror: fail, src: address }));
  const canvas = h("canvas", { width: 2 * width, height: 2 * height }),
    pen = canvas.getContext("2d");
  pen.fillStyle = background;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/png");
}
