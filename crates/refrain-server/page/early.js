// Runs before the page is first painted, so that a chosen theme does not flash. A plain script: modules run too late.
(() => {
  try {
    const theme = localStorage.getItem("refrain.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Without storage the system's preference applies.
  }
})();
