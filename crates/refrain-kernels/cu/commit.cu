// commit.cu: makes the chosen tokens the next step's inputs and reports them to the host; edits inputs
// between steps
//
// commit
//   tokens     [n]             i32, written
//   positions  [n]             i32, incremented; -1 when the row ends
//   rng        [n, 4]          u32, its position is incremented
//   history    [n, n_history]  i32, the token goes to index state.history_next of the first state.window entries
//   bias_ids   [n, n_bias]     i32, entries from state.n_bias_kept on become -1 once the position in rng reaches
//                              state.bias_until; 0: never
//   state      [n]             CommitState
//   count      u64 in device memory: ring entries written so far; null without a ring
//   ring       pinned: header of 64 bytes, then entries { u64 seq; CommitEntry rows[n]; i32 top_ids[n, n_top];
//              float top_logprobs[n, n_top]; } of `stride` bytes; or null
//   token      [n]             i32, chosen
//   logprob    [n]             f32
//   eog        [n_eog, n]      i32, tokens that end each row; negative: empty
//   top_ids    [n, n_top]      i32, the most probable tokens, copied to the ring after the rows; or null
//   top_logprobs [n, n_top]    f32, their log-probabilities, copied after them
//
// A row that is done or has a negative position changes nothing; its entry has the flag PAST_END. So does a row with
// state.hold, which then takes part again: the next step repeats its token. A row whose
// logprob is not finite ends, because its logits were not finite. Launch k (from 1) fills the ring entry
// (k - 1) % n_entries and then stores seq = k with system-scope release: a host that acquires it sees the
// payload.
//
// Launch       grid (1), block (n rounded up to 32), shared 0
// Requires     n at most 1024
//
// commit_loop  for steps that repeat on the device: commit, which also decides whether they do
//   n_body     steps in the body of the loop, of which this is the last
//   condition  of the loop; 0 outside one
//
// There is another body unless all rows have ended, or count has reached the word `until` at byte 8 of the ring,
// or the ring has no n_body free entries: it has n_entries, less those between count and `consumed`, the word at
// byte 0. The host writes both words at any time. Without another body, count is stored to the word `left` at byte
// 16, with release. In a loop, the decision is its condition.
//
// Launch       as commit
// Requires     a ring
//
// edit
//   words      [n_words]       u32, written
//   edits      [n_edits]       u32: the number of edits and three unused words; then { to, from, n, unused } for
//                              each; then their data. An edit copies n words from edits[from] to words[to].
//                              Destinations do not overlap.
//
// Launch       grid (16), block (256), shared 0. Words out of range of either are skipped
//
// Aliasing     none
// Determinism  exact
// Capture      safe
#include "dtype.cuh"
#include "overlap.cuh"

struct CommitState {
    u32 done, n_left, limit, window, history_next, bias_until, n_bias_kept, hold;
};

struct CommitEntry {
    i32 token;
    float logprob;
    u32 flags;
    i32 position;
};

const u32 ENDED = 1, LENGTH = 2, PAST_END = 4, NON_FINITE = 8;

// The row's inputs and outputs, and the sizes of their rows.
struct CommitRows {
    i32* tokens;
    i32* positions;
    u32* rng;
    i32* history;
    i32* bias_ids;
    CommitState* state;
    const i32* token;
    const float* logprob;
    const i32* eog;
    u32 n, n_history, n_bias, n_eog;
};

inline CommitEntry commit_row(const CommitRows& a, u32 row) {
    CommitState s = a.state[row];
    CommitEntry entry = {-1, 0.0f, PAST_END, -1};
    i32 position = a.positions[row];
    if (s.hold != 0) {
        s.hold = 0;
        a.state[row] = s;
        return entry;
    }
    if (s.done != 0 || position < 0) return entry;
    entry = CommitEntry{a.token[row], a.logprob[row], 0, position + 1};
    for (u32 i = 0; i < a.n_eog; i++) {
        if (entry.token >= 0 && a.eog[(u64)i * a.n + row] == entry.token) entry.flags |= ENDED;
    }
    // NaN fails both comparisons.
    if (!(entry.logprob < inf_f32() && entry.logprob > -inf_f32())) entry.flags |= NON_FINITE;
    s.n_left = s.n_left == 0 ? 0 : s.n_left - 1;
    if (s.n_left == 0 || (u32)entry.position >= s.limit) entry.flags |= LENGTH;
    a.tokens[row] = entry.token;
    a.positions[row] = entry.flags == 0 ? entry.position : -1;
    u32 random = a.rng[4 * row + 2] + 1;
    a.rng[4 * row + 2] = random;
    if (s.bias_until != 0 && random >= s.bias_until) {
        for (u32 i = s.n_bias_kept; i < a.n_bias; i++) a.bias_ids[(u64)row * a.n_bias + i] = -1;
        s.bias_until = 0;
    }
    u32 window = s.window < a.n_history ? s.window : a.n_history;
    if (window > 0) {
        u32 at = s.history_next % window;
        a.history[(u64)row * a.n_history + at] = entry.token;
        s.history_next = (at + 1) % window;
    }
    s.done = entry.flags != 0;
    a.state[row] = s;
    return entry;
}

// Copies the lists of probable tokens behind the rows of a ring entry.
inline void report_lists(u8* slot, u32 n, u32 n_top, const i32* top_ids, const float* top_logprobs) {
    i32* ids = (i32*)(slot + 8 + (u64)n * sizeof(CommitEntry));
    float* logprobs = (float*)(ids + n * n_top);
    for (u32 i = threadIdx.x; i < n * n_top; i += blockDim.x) {
        ids[i] = top_ids[i];
        logprobs[i] = top_logprobs[i];
    }
}

// unit step
extern "C" __global__ __launch_bounds__(1024) void commit_i32(i32* tokens, i32* positions, u32* rng, i32* history,
                                                              i32* bias_ids, CommitState* state, u64* count, u8* ring,
                                                              const i32* token, const float* logprob, const i32* eog,
                                                              const i32* top_ids, const float* top_logprobs, u32 n,
                                                              u32 n_history, u32 n_bias, u32 n_eog, u32 n_entries,
                                                              u32 stride, u32 n_top) {
    start();
    u32 row = threadIdx.x;
    u64 seq = ring == nullptr ? 0 : *count;
    u8* slot = ring + 64 + seq % n_entries * stride;
    CommitRows rows = {tokens,  positions, rng, history, bias_ids,  state,  token,
                       logprob, eog,       n,   n_history, n_bias, n_eog};
    if (row < n) {
        CommitEntry entry = commit_row(rows, row);
        if (ring != nullptr) ((CommitEntry*)(slot + 8))[row] = entry;
    }
    if (ring == nullptr) return;
    if (top_ids != nullptr) report_lists(slot, n, n_top, top_ids, top_logprobs);
    __threadfence_system();
    __syncthreads();
    if (row == 0) {
        *count = seq + 1;
        store_release_system((u64*)slot, seq + 1);
    }
}

extern "C" __global__ __launch_bounds__(256) void edit_u32(u32* words, const u32* edits, u32 n_words, u32 n_edits) {
    start();
    for (u32 edit_idx = blockIdx.x; edit_idx < edits[0] && 4 * (u64)edit_idx + 8 <= n_edits; edit_idx += gridDim.x) {
        const u32* p = edits + 4 + 4 * edit_idx;
        u64 to = p[0], from = p[1];
        for (u32 i = threadIdx.x; i < p[2]; i += blockDim.x) {
            if (to + i < n_words && from + i < n_edits) words[to + i] = edits[from + i];
        }
    }
}

// unit loop
#ifndef REFRAIN_ON_HOST
// The driver resolves it when it loads the module.
extern "C" void cudaGraphSetConditional(u64 condition, u32 value);
#endif

extern "C" __global__ __launch_bounds__(1024) void commit_loop_i32(
    i32* tokens, i32* positions, u32* rng, i32* history, i32* bias_ids, CommitState* state, u64* count, u8* ring,
    const i32* token, const float* logprob, const i32* eog, const i32* top_ids, const float* top_logprobs, u32 n,
    u32 n_history, u32 n_bias, u32 n_eog, u32 n_entries, u32 stride, u32 n_top, u32 n_body, u64 condition) {
    let_next_start();
    u32 row = threadIdx.x;
    // Only the host writes these, and a value that is a step old is good enough. Reading them takes longer than the
    // rest of the kernel, so it comes before the wait.
    u64 consumed = 0, until = 0;
    if (row == 0) {
        consumed = load_system((const u64*)ring);
        until = load_system((const u64*)(ring + 8));
    }
    wait_for_previous();
    u64 seq = *count;
    u8* slot = ring + 64 + seq % n_entries * stride;
    CommitRows rows = {tokens,  positions, rng, history, bias_ids,  state,  token,
                       logprob, eog,       n,   n_history, n_bias, n_eog};
    bool goes_on = false;
    if (row < n) {
        CommitEntry entry = commit_row(rows, row);
        goes_on = entry.flags == 0;
        ((CommitEntry*)(slot + 8))[row] = entry;
    }
    if (top_ids != nullptr) report_lists(slot, n, n_top, top_ids, top_logprobs);
    __threadfence_system();
    bool any_goes_on = __syncthreads_or(goes_on) != 0;
    if (row == 0) {
        u64 k = seq + 1;
        *count = k;
        store_release_system((u64*)slot, k);
        bool another = any_goes_on && k < until && k - consumed + n_body <= n_entries;
        if (!another) store_release_system((u64*)(ring + 16), k);
        if (condition != 0) cudaGraphSetConditional(condition, another ? 1 : 0);
    }
}
