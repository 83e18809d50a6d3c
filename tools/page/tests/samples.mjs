// Texts that the tests of the renderer and of the page share.

/** Texts that try to run script. None may do so; the ones marked with `hit` would set `window.hit`. */
export const HOSTILE = [
  "<script>window.hit = 1</script>",
  "<img src=x onerror='window.hit = 1'>",
  "<svg/onload=window.hit=1>",
  "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
  "<a href='javascript:window.hit=1'>a</a>",
  "<style>body { display: none }</style>",
  "[a](javascript:window.hit=1)",
  "[a](<javascript:window.hit=1>)",
  "[a](JAVASCRIPT&colon;window.hit=1)",
  "[a](data:text/html;base64,PHNjcmlwdD5wYXJlbnQuaGl0PTE8L3NjcmlwdD4=)",
  '[a](https://e.org/" onmouseover="window.hit=1)',
  "[a](https://e.org/'onclick='window.hit=1')",
  "![a](x\" onerror=\"window.hit=1)",
  "<https://e.org/\"onclick=\"window.hit=1>",
  "https://e.org/<script>window.hit=1</script>",
  "```html\n<script>window.hit = 1</script>\n```",
  '```"><img src=x onerror=window.hit=1>\nx\n```',
  "`<img src=x onerror=window.hit=1>`",
  "| <img src=x onerror=window.hit=1> | b |\n|---|---|\n| <script>window.hit=1</script> | c |",
  "- <img src=x onerror=window.hit=1>\n  > <script>window.hit=1</script>",
  "# <img src=x onerror=window.hit=1>",
  "**<img src=x onerror=window.hit=1>**",
  "&lt;img src=x onerror=window.hit=1&gt;",
  "<math><mtext></p><img src=x onerror=window.hit=1></math>",
];

/** Texts as models write them. */
export const SAMPLES = [
  "# Title\n\nSome *text* with `code`, a [link](https://example.org) and https://example.org/a?b=c.\n\n1. one\n   - two\n   - three\n\n" +
    "2. four\n\n> quote\n> more\n\n```rust\nfn main() {\n    println!(\"hi\");\n}\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\ndone\n",
  "Here is a list:\n- a\n- b\n\n  more of b\n- c\nand lazily c\n\n- [ ] d\n- [x] e\n\n***\nend",
];
