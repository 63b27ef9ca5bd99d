// Updates of a page: a hidden page leaves its event stream, and an update leaves what the user has opened.
"use strict";

(() => {
  let source = null;

  htmx.createEventSource = (url) => {
    if (source) source.close();
    source = new EventSource(url);
    return source;
  };

  const live = () => document.querySelector("#live[sse-connect]");

  // Browsers allow some six connections to a host, so pages in the background must not hold one each.
  document.addEventListener("visibilitychange", () => {
    const part = live();
    if (!part || !source) return;
    if (document.hidden) source.close();
    else if (source.readyState === EventSource.CLOSED)
      for (const node of [part, ...part.querySelectorAll("[sse-swap]")]) htmx.trigger(node, "htmx:afterProcessNode");
  });
  window.addEventListener("pagehide", () => source && source.close());
  window.addEventListener("pageshow", (event) => event.persisted && location.reload());

  // The server ends the stream when the user is signed out.
  document.addEventListener("htmx:sseClose", (event) => {
    if (event.detail && event.detail.type === "message") location.reload();
  });

  // An opened part stays open, a field keeps what was typed, and a selected text is not replaced.
  Idiomorph.defaults.ignoreActiveValue = true;
  Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, node) =>
    !(name === "open" && node instanceof HTMLDetailsElement);
  document.addEventListener("htmx:sseBeforeMessage", (event) => {
    const selection = document.getSelection();
    if (selection && !selection.isCollapsed && event.target.contains(selection.anchorNode)) event.preventDefault();
  });
})();
