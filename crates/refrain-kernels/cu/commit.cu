// commit.cu: the chosen token becomes the next step's input, and the host hears of it
//
//   tokens     [n]             i32, written
//   positions  [n]             i32, plus one; -1 when the row ends
//   rng        [n, 4]          u32, the position in it plus one
//   history    [n, n_history]  i32, the token at state.history_next of the first state.window places
//   state      [n]             CommitState
//   count      u64 in device memory: ring entries so far; null without a ring
//   ring       pinned: header of 64 bytes, then entries { u64 seq; CommitEntry rows[n]; } of `stride` bytes; or null
//   token      [n]             i32, chosen
//   logprob    [n]             f32
//   eog        [n_eog]         i32, tokens that end a row; negative: empty
//
// A row that is done or whose position is negative changes nothing; its entry says so. A row whose logprob is not finite
// ends: its logits were not. The k-th launch (from 1) fills
// entry (k - 1) % n_entries and then stores seq = k with system-scope release: a host that acquires it sees the payload.
//
// Launch    grid (1), block (n rounded up to 32), shared 0
// Requires  n at most 1024
// Exact. Capture: safe.
#include "dtype.cuh"
#include "overlap.cuh"

struct CommitState {
    u32 done, n_left, limit, window, history_next, unused[3];
};

struct CommitEntry {
    i32 token;
    float logprob;
    u32 flags;
    i32 position;
};

const u32 ENDED = 1, LENGTH = 2, PAST_END = 4, NON_FINITE = 8;

extern "C" __global__ __launch_bounds__(1024) void commit_i32(i32* tokens, i32* positions, u32* rng, i32* history,
                                                              CommitState* state, u64* count, u8* ring,
                                                              const i32* token, const float* logprob, const i32* eog,
                                                              u32 n, u32 n_history, u32 n_eog, u32 n_entries,
                                                              u32 stride) {
    start();
    u32 row = threadIdx.x;
    u64 seq = ring == nullptr ? 0 : *count;
    u8* slot = ring + 64 + seq % n_entries * stride;
    if (row < n) {
        CommitState s = state[row];
        CommitEntry entry = {-1, 0.0f, PAST_END, -1};
        i32 position = positions[row];
        if (s.done == 0 && position >= 0) {
            entry = CommitEntry{token[row], logprob[row], 0, position + 1};
            for (u32 i = 0; i < n_eog; i++) {
                if (entry.token >= 0 && eog[i] == entry.token) entry.flags |= ENDED;
            }
            // NaN fails both comparisons.
            if (!(entry.logprob < inf_f32() && entry.logprob > -inf_f32())) entry.flags |= NON_FINITE;
            s.n_left = s.n_left == 0 ? 0 : s.n_left - 1;
            if (s.n_left == 0 || (u32)entry.position >= s.limit) entry.flags |= LENGTH;
            tokens[row] = entry.token;
            positions[row] = entry.flags == 0 ? entry.position : -1;
            rng[4 * row + 2] += 1;
            u32 window = s.window < n_history ? s.window : n_history;
            if (window > 0) {
                u32 at = s.history_next % window;
                history[(u64)row * n_history + at] = entry.token;
                s.history_next = (at + 1) % window;
            }
            s.done = entry.flags != 0;
            state[row] = s;
        }
        if (ring != nullptr) ((CommitEntry*)(slot + 8))[row] = entry;
    }
    if (ring == nullptr) return;
    __threadfence_system();
    __syncthreads();
    if (row == 0) {
        *count = seq + 1;
        store_release_system((u64*)slot, seq + 1);
    }
}
