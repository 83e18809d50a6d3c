// fibers.cpp: runs a grid block by block. Each thread is a fiber that yields at barriers and shuffles.
//
// Every second launch runs blocks and threads in reverse order, so a missing barrier changes the results.
#include "cuda.h"

#include <setjmp.h>
#include <ucontext.h>

#include <vector>

Index threadIdx, blockIdx, blockDim, gridDim;
unsigned n_wrong_peeks;

std::map<std::string, Bind>& kernels() {
    static std::map<std::string, Bind> all;
    return all;
}

namespace {

enum State { READY, AT_BLOCK, AT_WARP, AT_GROUP, RETURNED };

struct Fiber {
    std::vector<char> stack;
    jmp_buf at;
    State state;
    bool started;
    bool vote;
    uint64_t value;
    unsigned barrier, members;
};

std::vector<Fiber> fibers;
jmp_buf scheduler;
std::function<void()> kernel;
unsigned current;
bool voted;
// Values that the lanes of a warp passed to the pending shuffle, and the mask of participating lanes.
uint64_t brought[32][32];
uint32_t present[32];

void pause(State state) {
    fibers[current].state = state;
    if (_setjmp(fibers[current].at) == 0) _longjmp(scheduler, 1);
}

void enter() {
    kernel();
    fibers[current].state = RETURNED;
    _longjmp(scheduler, 1);
}

// Runs the current fiber until it waits or returns. Only the first entry to a stack uses a context, which costs a
// system call; later entries use a jump.
void resume() {
    threadIdx = {current, 0, 0};
    if (_setjmp(scheduler) != 0) return;
    Fiber& fiber = fibers[current];
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.data();
    context.uc_stack.ss_size = fiber.stack.size();
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
    setcontext(&context);
}

// Resumes `n` fibers from `first` on once all that have not returned wait in `state`.
bool release(unsigned first, unsigned n, State state) {
    bool any = false;
    for (unsigned i = first; i < first + n; i++) {
        if (fibers[i].state != state && fibers[i].state != RETURNED) return false;
        any = any || fibers[i].state == state;
    }
    if (!any) return false;
    if (state == AT_WARP) present[first / 32] = 0;
    if (state == AT_BLOCK) voted = false;
    for (unsigned i = first; i < first + n; i++) {
        if (fibers[i].state != state) continue;
        if (state == AT_WARP) {
            brought[first / 32][i - first] = fibers[i].value;
            present[first / 32] |= 1u << (i - first);
        } else {
            voted = voted || fibers[i].vote;
        }
        fibers[i].state = READY;
    }
    return true;
}

// Resumes the fibers at a named barrier once its member count has arrived.
bool release_groups(unsigned n) {
    unsigned come[16] = {};
    for (unsigned i = 0; i < n; i++) come[fibers[i].barrier] += fibers[i].state == AT_GROUP;
    bool any = false;
    for (unsigned i = 0; i < n; i++) {
        if (fibers[i].state != AT_GROUP || come[fibers[i].barrier] < fibers[i].members) continue;
        fibers[i].state = READY;
        any = true;
    }
    return any;
}

void run_block(unsigned n, bool backwards) {
    for (unsigned i = 0; i < n; i++) {
        fibers[i].state = READY;
        fibers[i].started = false;
    }
    for (;;) {
        bool moved = false, done = true;
        for (unsigned k = 0; k < n; k++) {
            current = backwards ? n - 1 - k : k;
            if (fibers[current].state != READY) continue;
            resume();
            moved = true;
        }
        for (unsigned first = 0; first < n; first += 32) moved = release(first, min(32, n - first), AT_WARP) || moved;
        moved = release(0, n, AT_BLOCK) || moved;
        moved = release_groups(n) || moved;
        for (unsigned i = 0; i < n; i++) done = done && fibers[i].state == RETURNED;
        if (done) return;
        if (!moved) {
            fprintf(stderr, "threads wait for each other\n");
            abort();
        }
    }
}

}  // namespace

bool block_wait(bool vote) {
    fibers[current].vote = vote;
    pause(AT_BLOCK);
    return voted;
}

void group_wait(unsigned barrier, unsigned n) {
    fibers[current].barrier = barrier;
    fibers[current].members = n;
    pause(AT_GROUP);
}

uint64_t warp_wait(uint64_t mine, unsigned from) {
    fibers[current].value = mine;
    pause(AT_WARP);
    unsigned warp = threadIdx.x / 32;
    if (!(present[warp] >> from & 1)) {
        fprintf(stderr, "a shuffle reads a lane that has returned\n");
        abort();
    }
    return brought[warp][from];
}

unsigned warp_vote(bool vote) {
    fibers[current].value = vote;
    pause(AT_WARP);
    unsigned warp = threadIdx.x / 32, votes = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        if (present[warp] >> lane & 1 && brought[warp][lane] != 0) votes |= 1u << lane;
    }
    return votes;
}

extern "C" __attribute__((visibility("default"))) int run_kernel(const char* name, const uint32_t* grid,
                                                                 const uint32_t* block, const uint8_t* params,
                                                                 const size_t* offsets) {
    static unsigned n_launches;
    auto found = kernels().find(name);
    if (found == kernels().end()) return 1;
    bool backwards = n_launches++ % 2 == 1;
    kernel = found->second(params, offsets);
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    while (fibers.size() < block[0]) fibers.push_back({std::vector<char>(64 * 1024), {}, READY, false, false, 0, 0, 0});
    unsigned n_blocks = grid[0] * grid[1] * grid[2];
    for (unsigned k = 0; k < n_blocks; k++) {
        unsigned b = backwards ? n_blocks - 1 - k : k;
        blockIdx = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        // From none to all of the unverified reads of the block's threads.
        n_wrong_peeks = backwards ? b * 97 % (4 * block[0]) : 0;
        run_block(block[0], backwards);
    }
    return 0;
}
