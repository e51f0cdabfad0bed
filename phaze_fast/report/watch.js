// Keeps what goes wrong where a person, or a test, can read it: <html data-errors>.
(function () {
  "use strict";
  const root = document.documentElement;
  const keep = (what) => {
    root.dataset.errors = (root.dataset.errors ? root.dataset.errors + "\n" : "") + what;
  };
  window.addEventListener("error", (event) => keep(event.message || "a part failed to load"), true);
  window.addEventListener("unhandledrejection", (event) => keep(String(event.reason)));
  document.addEventListener("securitypolicyviolation", (event) =>
    keep("refused: " + event.violatedDirective + " " + event.blockedURI));
})();
