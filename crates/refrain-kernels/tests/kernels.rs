//! Compares every launcher with the reference over a table of cases: on the simulated device, with the
//! kernels compiled for the host, and on a GPU.
#![allow(unreachable_pub, reason = "the modules are this test's own")]

mod bed;
mod cases;
mod host;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bed::{Bed, Case, Role, dense, f32s, i32s, normals, run_all};
use refrain_driver::sim::SimOptions;
use refrain_driver::{MemoryLayout, Method, RecordOptions, Ring};
use refrain_graph::StepFlags;
use refrain_kernels::{
    CommitArgs, CommitEntry, CommitRing, CommitState, CommitTop, Edits, GemmArgs, GemmPlan, KernelError,
    LINEAR_DTYPES, LinearArgs, LinearPart, RmsNormArgs,
};
use refrain_tensor::DType;
use refrain_testkit::{Tol, encode};

/// GPU tests run one at a time, because they share the device's primary context.
static TURN: Mutex<()> = Mutex::new(());

macro_rules! both {
    ($(fn $name:ident($bed:ident) $body:block)*) => {
        $(mod $name {
            use super::*;

            fn body(mut $bed: Bed) $body

            #[test]
            fn on_the_simulated_device() {
                body(Bed::sim());
            }

            #[test]
            #[cfg_attr(not(feature = "host-tests"), ignore = "needs a C++ compiler: cargo xtask ci turns it on")]
            fn as_compiled_for_the_host() {
                body(host::bed());
            }

            #[test]
            #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
            fn on_a_gpu() {
                let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
                body(Bed::gpu());
            }
        })*
    };
}

both! {
    fn linear_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::dense::linear());
    }

    fn products_in_one_launch_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::dense::products());
    }

    fn products_have_the_same_bits_alone_and_with_others(bed) {
        same_bits_with_others(&mut bed);
    }

    fn one_row_times_weights_with_norms_and_gates_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::product::product());
    }

    fn a_few_rows_times_packed_weights_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::few::few());
    }

    fn the_rows_of_many_sequences_times_weights_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::batch::batch());
    }

    fn routers_choose_as_the_reference_does(bed) {
        run_all(&mut bed, cases::experts::routes());
    }

    fn routers_within_other_launches_choose_as_the_reference_does(bed) {
        run_all(&mut bed, cases::experts::routers());
    }

    fn rows_times_the_experts_chosen_for_them_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::experts::products());
    }

    fn expert_layers_of_many_rows_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::experts::layers());
    }

    fn packing_gives_the_layout_that_products_read(bed) {
        run_all(&mut bed, cases::product::packing());
    }

    fn gather_rows_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::dense::gather());
    }

    fn norms_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::dense::norms());
    }

    fn unary_functions_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::elementwise::unary());
    }

    fn binary_functions_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::elementwise::binary());
    }

    fn gates_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::elementwise::gate());
    }

    fn copies_and_casts_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::elementwise::copies());
    }

    fn reductions_and_softmax_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::elementwise::rows());
    }

    fn rope_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::attention::rope());
    }

    fn kv_append_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::attention::kv_append());
    }

    fn recurrent_layers_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::recurrent::short_conv());
        run_all(&mut bed, cases::recurrent::gated_delta());
    }

    fn adapters_of_sequences_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::lora::lora());
    }

    fn rope_with_kv_append_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::attention::rope_kv());
    }

    fn attention_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::attention::attention());
    }

    fn attend_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::attend::attend());
    }

    fn attend_appends_the_bits_of_rope_with_kv_append(bed) {
        cases::attend::same_bits_as_rope_kv(&mut bed);
    }

    fn sampling_chooses_what_the_reference_chooses(bed) {
        run_all(&mut bed, cases::sample::sample());
    }

    fn products_on_tensor_cores_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::prompt::gemm());
    }

    fn quantised_matrices_are_decoded_as_the_reference_does(bed) {
        run_all(&mut bed, cases::prompt::dequant());
    }

    fn rows_in_16_bits_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::prompt::narrow());
    }

    fn attention_of_many_rows_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::prompt::flash());
    }

    fn functions_of_elements_of_every_type_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::training::map());
    }

    fn norms_softmax_and_reductions_of_every_type_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::training::rows());
    }

    fn moves_of_every_type_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::training::moves());
    }

    fn rows_that_share_an_id_are_summed_as_the_reference_does(bed) {
        run_all(&mut bed, cases::training::scatter());
    }

    fn cross_entropy_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::training::loss());
    }

    fn the_optimiser_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::training::optimiser());
    }

    fn products_of_values_in_any_layout_agree_with_the_reference(bed) {
        run_all(&mut bed, cases::train::matmul());
    }

    fn attention_among_rows_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::train::attention());
    }

    fn the_gradient_of_attention_among_rows_agrees_with_the_reference(bed) {
        run_all(&mut bed, cases::train::attention_grad());
    }

    fn digests_are_those_of_the_bytes(bed) {
        run_all(&mut bed, cases::prompt::digest());
    }

    fn a_row_of_a_product_has_the_same_bits_for_every_number_of_rows(bed) {
        same_bits_for_every_m(&mut bed);
    }

    fn commit_feeds_the_token_back_and_stops_at_the_end(bed) {
        commit_until_done(&mut bed);
    }

    fn the_last_commit_of_a_body_decides_whether_a_loop_goes_on(bed) {
        commit_decides_whether_a_loop_goes_on(&mut bed);
    }

    fn an_edit_changes_the_words_it_names_and_no_other(bed) {
        edit_ranges(&mut bed);
    }
}

/// Compute capability 8.6, 8.9 and 12.0. There, attention has smaller rings, sampling holds fewer tokens in
/// shared memory, and most matmuls leave no space for a second block on the SM.
#[test]
#[cfg_attr(not(feature = "host-tests"), ignore = "needs a C++ compiler: cargo xtask ci turns it on")]
fn kernels_agree_with_the_reference_where_a_block_has_99_kib_of_shared_memory() {
    let mut bed = host::bed_on(SimOptions { shared_block_bytes: 99 << 10, ..SimOptions::default() });
    // The other head sizes run all cases.
    run_all(&mut bed, cases::attend::attend().into_iter().step_by(4).collect());
    run_all(&mut bed, cases::sample::sample().into_iter().step_by(4).collect());
    // There, gradients of the largest heads do not fit the tensor-core kernels.
    let is_large = |case: &Case| case.name.contains("BF16") && case.name.contains("of 128");
    run_all(&mut bed, cases::train::attention_grad().into_iter().filter(is_large).collect());
    // The longest float row does not fit and is refused; plans then use another kernel and report it.
    let (long, fitting): (Vec<Case>, Vec<Case>) = cases::product::product()
        .into_iter()
        .partition(|case| case.name.contains("16]") && case.name.contains(&format!("k={}", 65 * 256)));
    run_all(&mut bed, fitting.into_iter().step_by(3).collect());
    assert_eq!(long.len(), 2, "BF16 and F16");
    for case in long {
        let refused = case.run(&mut bed).expect_err(&case.name);
        assert!(refused.contains("bytes of shared memory"), "{}: {refused}", case.name);
    }
}

// Twins are the reference, which rounds the state to F32 only between launches.
#[test]
#[cfg_attr(not(feature = "host-tests"), ignore = "needs a C++ compiler: cargo xtask ci turns it on")]
fn a_recurrent_layer_has_the_same_bits_however_a_prompt_is_split_as_compiled_for_the_host() {
    cases::recurrent::same_bits_however_split(&mut host::bed());
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn a_recurrent_layer_has_the_same_bits_however_a_prompt_is_split_on_a_gpu() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    cases::recurrent::same_bits_however_split(&mut Bed::gpu());
}

#[test]
fn sampling_from_large_vocabularies_agrees_with_the_reference_on_the_simulated_device() {
    // Twins are the reference: one vocabulary suffices to test the launcher.
    run_all(&mut Bed::sim(), cases::sample::large().into_iter().take(2).collect());
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn sampling_from_large_vocabularies_agrees_with_the_reference_on_a_gpu() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    run_all(&mut Bed::gpu(), cases::sample::large());
}

// Kernels on the host copy all memory in and out, so concurrent launches cannot run there.
#[test]
fn the_optimiser_accepts_more_tensors_than_a_table_holds_on_the_simulated_device() {
    run_all(&mut Bed::sim(), cases::training::many_tensors());
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn the_optimiser_accepts_more_tensors_than_a_table_holds_on_a_gpu() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    run_all(&mut Bed::gpu(), cases::training::many_tensors());
}

fn same_bits_for_every_m(bed: &mut Bed) {
    for dtype in LINEAR_DTYPES {
        let (m, n, k) = (11, 9, if dtype.is_quantized() { 768 } else { 203 });
        let x = normals(m * k, 1);
        let w = encode(dtype, &normals(n * k, 2));
        let mut layout = MemoryLayout::new("rows");
        let [x_at, w_at] = [("x", 4 * m * k), ("w", w.len())].map(|(name, n)| layout.device(name, n as u64));
        let [all_at, one_at] =
            [("all", 4 * m * n), ("one", 4 * n)].map(|(name, n)| layout.device(name, n as u64));
        let memory = bed.plan(&layout);
        let [x_buf, w_buf, all_buf, one_buf] = [x_at, w_at, all_at, one_at].map(|r| memory.buf(r));
        let mut lease = memory.lease().unwrap();
        bed.stream.upload(&mut lease, x_buf, &f32s(&x)).unwrap();
        bed.stream.upload(&mut lease, w_buf, &w).unwrap();
        let product = |x, y, m| {
            let parts = &[LinearPart { w: w_buf, y, n }];
            let args = LinearArgs { x, w_dtype: dtype, parts, m, k, w_is_fixed: true, step: "product" };
            bed.kernels.linear(&args).unwrap()
        };
        let whole = product(dense(x_buf, &[m, k]), all_buf, m);
        let out = bed.stream.run(&mut lease, false, |q| q.launch(&whole)).unwrap();
        let all: Vec<u32> = out.values(&mut bed.stream, all_buf).unwrap();
        for row in 0..m {
            let x_row = x_buf.slice((4 * row * k) as u64, 4 * k as u64).unwrap();
            let one = product(dense(x_row, &[1, k]), one_buf, 1);
            let out = bed.stream.run(&mut lease, false, |q| q.launch(&one)).unwrap();
            let one: Vec<u32> = out.values(&mut bed.stream, one_buf).unwrap();
            assert_eq!(one, all[row * n..][..n], "{dtype} row {row}");
        }
    }
}

/// Three products with enough columns for two per warp must equal each of them computed alone.
fn same_bits_with_others(bed: &mut Bed) {
    for dtype in [DType::F32, DType::BF16, DType::Q2_K, DType::IQ3_S] {
        let (k, ns) = (512, [2051, 7, 1030]);
        let n: usize = ns.iter().sum();
        let w = encode(dtype, &normals(n * k, 2));
        let row_bytes = w.len() / n;
        let mut layout = MemoryLayout::new("products");
        let regions = [("x", 4 * k), ("w", w.len() + 64), ("together", 4 * n), ("alone", 4 * n)]
            .map(|(name, n)| layout.device(name, n as u64));
        let memory = bed.plan(&layout);
        let [x_buf, w_buf, together, alone] = regions.map(|r| memory.buf(r));
        let mut lease = memory.lease().unwrap();
        bed.stream.upload(&mut lease, x_buf, &f32s(&normals(k, 1))).unwrap();
        let part = |y: refrain_driver::Buf, i: usize| {
            let before: usize = ns[..i].iter().sum();
            let w_at = (before * row_bytes).next_multiple_of(16) as u64;
            LinearPart {
                w: w_buf.slice(w_at, (ns[i] * row_bytes) as u64).unwrap(),
                y: y.slice(4 * before as u64, 4 * ns[i] as u64).unwrap(),
                n: ns[i],
            }
        };
        for i in 0..ns.len() {
            let before: usize = ns[..i].iter().sum();
            let bytes = &w[before * row_bytes..][..ns[i] * row_bytes];
            bed.stream.upload(&mut lease, part(alone, i).w, bytes).unwrap();
        }
        let product = |parts: &[LinearPart]| {
            let x = dense(x_buf, &[1, k]);
            let args = LinearArgs { x, w_dtype: dtype, parts, m: 1, k, w_is_fixed: true, step: "product" };
            bed.kernels.linear(&args).unwrap()
        };
        let launches = [
            product(&[0, 1, 2].map(|i| part(together, i))),
            product(&[part(alone, 0)]),
            product(&[part(alone, 1)]),
            product(&[part(alone, 2)]),
        ];
        let out =
            bed.stream.run(&mut lease, true, |q| launches.iter().try_for_each(|l| q.launch(l))).unwrap();
        let all: Vec<u32> = out.values(&mut bed.stream, together).unwrap();
        let out = bed.stream.run(&mut lease, false, |_| Ok(())).unwrap();
        let one: Vec<u32> = out.values(&mut bed.stream, alone).unwrap();
        assert_eq!(all, one, "{dtype}");
    }
}

/// One row, committed as a step and as the last step of a loop's body: both do the same, and the second also decides
/// whether there is another body.
fn commit_decides_whether_a_loop_goes_on(bed: &mut Bed) {
    let mut layout = MemoryLayout::new("loop");
    let words = |n: usize| 4 * n as u64;
    let sizes = [1, 1, 1, 1, 4, 2, 2, 2].map(words);
    let names = ["token", "logprob", "tokens", "positions", "rng", "history", "bias_ids", "eog"];
    let mut regions = Vec::new();
    for (name, bytes) in names.iter().zip(sizes) {
        regions.push(layout.device(name, bytes));
    }
    let (state, count) = (layout.device("state", 32), layout.device("count", 8));
    let ring = layout.pinned(bed::PINNED, Ring::bytes(4, size_of::<CommitEntry>()).unwrap());
    let memory = bed.plan(&layout);
    let bufs: Vec<_> = regions.into_iter().map(|r| memory.buf(r)).collect();
    let [state, count] = [state, count].map(|r| memory.buf(r));
    let mut host = Ring::new(&memory, ring, 4, size_of::<CommitEntry>()).unwrap();
    let mut lease = memory.lease().unwrap();
    let args = CommitArgs {
        token: bufs[0],
        logprob: bufs[1],
        tokens: bufs[2],
        positions: bufs[3],
        rng: bufs[4],
        history: bufs[5],
        bias_ids: bufs[6],
        state,
        eog: bufs[7],
        ring: Some(CommitRing { ring: host.buf(), count, n_entries: 4 }),
        top: None,
        n: 1,
        n_history: 2,
        n_bias: 2,
        n_eog: 2,
        step: "commit",
    };
    assert!(bed.kernels.commit_loop(&CommitArgs { ring: None, ..args }, 1).is_err());
    assert!(bed.kernels.commit_loop(&args, 0).is_err());
    let step = bed.kernels.commit(&args).unwrap();
    // Steps in a body, results that the loop may write, tokens left, results before it that the host has not read,
    // and whether there is another body after the first result.
    let cases: [(u32, u64, u32, usize, bool); 8] = [
        (1, 9, 9, 0, true),
        (1, 1, 9, 0, false),
        (1, 9, 1, 0, false),
        (1, 9, 9, 2, true),
        (1, 9, 9, 3, false),
        (2, 9, 9, 1, true),
        (2, 9, 9, 2, false),
        (4, 9, 9, 0, false),
    ];
    for (n_body, n, n_left, n_unread, goes_on) in cases {
        let repeated = bed.kernels.commit_loop(&args, n_body).unwrap();
        let mut outcomes = Vec::new();
        for launch in [&step, &repeated] {
            host.restart();
            let row = CommitState {
                n_left,
                limit: 100,
                window: 2,
                n_bias_kept: 1,
                bias_until: 8,
                ..bytemuck::Zeroable::zeroed()
            };
            for (buf, bytes) in [
                (bufs[0], i32s(&[5])),
                (bufs[1], f32s(&[-0.5])),
                (bufs[2], i32s(&[4])),
                (bufs[3], i32s(&[6])),
                (bufs[4], i32s(&[1, 2, 7, 0])),
                (bufs[5], i32s(&[-1, -1])),
                (bufs[6], i32s(&[3, 9])),
                (bufs[7], i32s(&[1, -1])),
                (state, bytemuck::bytes_of(&row).to_vec()),
                (count, (n_unread as u64).to_le_bytes().to_vec()),
            ] {
                bed.stream.upload(&mut lease, buf, &bytes).unwrap();
            }
            assert!((0..n_unread).all(|_| host.reserve()));
            assert!(host.begin_loop(n, 1));
            bed.stream.run(&mut lease, false, |q| q.launch(launch)).unwrap();
            bed.stream.synchronize().unwrap();
            let mut seen = Vec::new();
            for buf in bufs.iter().chain([&state, &count]) {
                let mut bytes = vec![0; buf.len() as usize];
                bed.stream.download(&lease, *buf, &mut bytes).unwrap();
                seen.push(bytes);
            }
            let mut ring = vec![0; host.buf().len() as usize];
            bed.stream.download(&lease, host.buf(), &mut ring).unwrap();
            seen.push(ring[64..].to_vec());
            outcomes.push((seen, host.loop_end()));
        }
        assert_eq!(outcomes[0].0, outcomes[1].0);
        assert_eq!(outcomes[0].1, None, "a step decides nothing");
        let end = (!goes_on).then_some(n_unread as u64 + 1);
        assert_eq!(outcomes[1].1, end, "{:?}", (n_body, n, n_left, n_unread));
    }
}

/// Three rows: one ends by a token, one by its limit, one is padding. Replays continue after all have ended.
fn commit_until_done(bed: &mut Bed) {
    const N: usize = 3;
    let mut layout = MemoryLayout::new("commit");
    let words = |n: usize| 4 * n as u64;
    let names =
        [("token", N), ("logprob", N), ("tokens", N), ("positions", N), ("rng", 4 * N), ("history", 3 * N)];
    let regions = names.map(|(name, n)| layout.device(name, words(n)));
    let [state, eog, count, bias_ids] =
        [("state", 32 * N), ("eog", 8 * N), ("count", 8), ("bias_ids", 12 * N)]
            .map(|(n, b)| layout.device(n, b as u64));
    const PAYLOAD: usize = N * size_of::<CommitEntry>() + CommitTop::bytes(N, 2);
    let [top_ids, top_logprobs] = ["top_ids", "top_logprobs"].map(|name| layout.device(name, words(2 * N)));
    let ring = layout.pinned(bed::PINNED, Ring::bytes(4, PAYLOAD).unwrap());
    let memory = bed.plan(&layout);
    let [top_ids, top_logprobs] = [top_ids, top_logprobs].map(|r| memory.buf(r));
    let [token, logprob, tokens, positions, rng, history] = regions.map(|r| memory.buf(r));
    let [state, eog, count, bias_ids] = [state, eog, count, bias_ids].map(|r| memory.buf(r));
    let mut host = Ring::new(&memory, ring, 4, PAYLOAD).unwrap();
    let mut lease = memory.lease().unwrap();
    // The biases of the first row lapse after its second token, those of the second row stay.
    let states =
        [(100, 1000, 32), (100, 13, 0), (100, 1000, 1)].map(|(n_left, limit, bias_until)| CommitState {
            done: 0,
            n_left,
            limit,
            window: 2,
            history_next: 1,
            bias_until,
            n_bias_kept: 1,
            hold: 0,
        });
    let rng_before: Vec<i32> = (0..N as i32).flat_map(|i| [5, 6, 30 + i, 9]).collect();
    let mut set = |buf, bytes: &[u8]| bed.stream.upload(&mut lease, buf, bytes).unwrap();
    set(tokens, &i32s(&[-7; N]));
    set(positions, &i32s(&[10, 11, -1]));
    set(rng, &i32s(&rng_before));
    // The last slot of each row is outside the window.
    set(history, &i32s(&[-1; 3 * N]));
    set(state, bytemuck::bytes_of(&states));
    // Every row has its own end tokens: a token that ends the first does not end the second.
    set(eog, &i32s(&[-1, -1, -1, 42, 7, 42]));
    set(bias_ids, &i32s(&[3, 4, 5, 3, 4, 5, 3, 4, 5]));
    set(count, &[0; 8]);
    let launch = bed
        .kernels
        .commit(&CommitArgs {
            token,
            logprob,
            tokens,
            positions,
            rng,
            history,
            bias_ids,
            state,
            eog,
            ring: Some(CommitRing { ring: host.buf(), count, n_entries: 4 }),
            top: Some(CommitTop { ids: top_ids, logprobs: top_logprobs, n_top: 2 }),
            n: N,
            n_history: 3,
            n_bias: 3,
            n_eog: 2,
            step: "commit",
        })
        .unwrap();
    let options = RecordOptions::named("commit");
    let graph = bed.stream.record(&memory, Method::Stream, &options, |q| q.launch(&launch)).unwrap();

    let entry = |token, flags, position| (token, flags, position);
    let past = entry(-1, StepFlags::PAST_END.0, -1);
    let expected = [
        [entry(7, 0, 11), entry(8, 0, 12), past],
        // A logprob that is not finite ends a row, in addition to any other reason.
        [entry(-1, 0, 12), entry(8, StepFlags::LENGTH.0 | StepFlags::NON_FINITE.0, 13), past],
        [entry(42, StepFlags::ENDED.0, 13), past, past],
        [past, past, past],
        [past, past, past],
    ];
    let lapsed = [&[3, 4, 5], &[3, -1, -1], &[3, -1, -1], &[3, -1, -1], &[3, -1, -1]];
    for (step, (chosen, expected)) in
        [[7, 8, 9], [-1, 8, 9], [42, 5, 5], [6, 6, 6], [6, 6, 6]].iter().zip(expected).enumerate()
    {
        bed.stream.upload(&mut lease, token, &i32s(chosen)).unwrap();
        let usual = -0.5 * step as f32;
        let logprobs = if step == 1 { [usual, f32::NAN, usual] } else { [usual; N] };
        bed.stream.upload(&mut lease, logprob, &f32s(&logprobs)).unwrap();
        bed.stream.upload(&mut lease, top_ids, &i32s(&[1, 2, 3, 4, 5, step as i32])).unwrap();
        bed.stream.upload(&mut lease, top_logprobs, &f32s(&[-0.5, -1.0, -1.5, -2.0, -2.5, usual])).unwrap();
        assert!(host.reserve());
        graph.replay(&mut lease, &mut bed.stream).unwrap();
        let mut payload = [0; PAYLOAD];
        let seq = host.take(&mut bed.stream, Duration::from_secs(5), &mut payload).unwrap();
        assert_eq!(seq, step as u64 + 1);
        for (row, expected) in expected.iter().enumerate() {
            let word = |i: usize| i32::from_le_bytes(payload[16 * row + 4 * i..][..4].try_into().unwrap());
            assert_eq!((word(0), word(2) as u32, word(3)), *expected, "step {step} row {row}");
            let logprob = if expected.1 == StepFlags::PAST_END.0 { 0.0 } else { logprobs[row] };
            assert_eq!(word(1) as u32, logprob.to_bits());
        }
        let lists =
            [i32s(&[1, 2, 3, 4, 5, step as i32]), f32s(&[-0.5, -1.0, -1.5, -2.0, -2.5, usual])].concat();
        assert_eq!(payload[N * size_of::<CommitEntry>()..], lists, "step {step}");
        let mut ids = [0; 36];
        bed.stream.download(&lease, bias_ids, &mut ids).unwrap();
        assert_eq!(ids[..12], i32s(lapsed[step]), "step {step}");
        assert_eq!(ids[12..], i32s(&[3, 4, 5, 3, 4, 5]), "step {step}");
    }
    // After a restart the device's count is 0, and entry numbers begin at 1.
    assert!(!host.has_next() && host.reserve() && host.n_pending() == 1);
    host.restart();
    assert_eq!(host.n_pending(), 0);
    bed.stream.upload(&mut lease, count, &[0; 8]).unwrap();
    assert!(host.reserve());
    graph.replay(&mut lease, &mut bed.stream).unwrap();
    bed.stream.synchronize().unwrap();
    assert!(host.has_next());
    assert_eq!(host.try_take(&mut [0; PAYLOAD]).unwrap(), Some(1));
    let mut get = |buf: refrain_driver::Buf| -> Vec<i32> {
        let mut bytes = vec![0; buf.len() as usize];
        bed.stream.download(&lease, buf, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|w| i32::from_le_bytes(w.try_into().unwrap())).collect()
    };
    assert_eq!(get(tokens), [42, 8, -7]);
    assert_eq!(get(positions), [-1, -1, -1]);
    assert_eq!(get(rng), [5, 6, 33, 9, 5, 6, 33, 9, 5, 6, 32, 9]);
    assert_eq!(get(history), [-1, 42, -1, 8, 8, -1, -1, -1, -1]);
    let ended = [1, 97, 1000, 2, 0, 0, 1, 0];
    assert_eq!(get(state), [ended, [1, 98, 13, 2, 1, 0, 1, 0], [0, 100, 1000, 2, 1, 1, 1, 0]].concat());
    // A held row changes nothing but its hold, and takes part again in the next step.
    let held = CommitState { done: 0, n_left: 5, limit: 100, window: 0, hold: 1, ..states[0] };
    bed.stream.upload(&mut lease, state.slice(0, 32).unwrap(), bytemuck::bytes_of(&held)).unwrap();
    bed.stream.upload(&mut lease, positions.slice(0, 4).unwrap(), &i32s(&[20])).unwrap();
    let before: Vec<u8> = {
        let mut bytes = vec![0; 16];
        bed.stream.download(&lease, rng.slice(0, 16).unwrap(), &mut bytes).unwrap();
        bytes
    };
    for (flags, position, hold) in [(StepFlags::PAST_END.0, 20, 0), (0, 21, 0)] {
        assert!(host.reserve());
        graph.replay(&mut lease, &mut bed.stream).unwrap();
        let mut payload = [0; PAYLOAD];
        host.take(&mut bed.stream, Duration::from_secs(5), &mut payload).unwrap();
        assert_eq!(payload[8..12], flags.to_le_bytes());
        let mut bytes = [0; 4];
        bed.stream.download(&lease, positions.slice(0, 4).unwrap(), &mut bytes).unwrap();
        assert_eq!(i32::from_le_bytes(bytes), position);
        let mut bytes = [0; 32];
        bed.stream.download(&lease, state.slice(0, 32).unwrap(), &mut bytes).unwrap();
        let now: CommitState = bytemuck::pod_read_unaligned(&bytes);
        assert_eq!((now.hold, now.n_left), (hold, if flags == 0 { 4 } else { 5 }));
        let mut bytes = vec![0; 16];
        bed.stream.download(&lease, rng.slice(0, 16).unwrap(), &mut bytes).unwrap();
        assert_eq!(bytes == before, flags != 0);
    }
}

/// Edits of one word and of more than a block has threads, in two messages; nothing else may change.
fn edit_ranges(bed: &mut Bed) {
    const N: usize = 1200;
    let mut layout = MemoryLayout::new("edit");
    let (words, edits) = (layout.device("words", 4 * N as u64), layout.device("edits", 4 * 1024));
    let memory = bed.plan(&layout);
    let (words, edits) = (memory.buf(words), memory.buf(edits));
    let mut lease = memory.lease().unwrap();
    let launch = bed.kernels.edit(words, edits, "edit").unwrap();
    let mut want: Vec<i32> = (0..N as i32).map(|i| -i).collect();
    bed.stream.upload(&mut lease, words, &i32s(&want)).unwrap();
    let long: Vec<u32> = (0..700).map(|i| 3 * i).collect();
    let (mut first, mut second) = (Edits::default(), Edits::default());
    first.push(5, &[77]);
    first.push(300, &long);
    (0..20).for_each(|i| first.push(1100 + 2 * i, &[i]));
    second.push(301, &[9]);
    // Ends past the last word.
    second.push(N as u32 - 1, &[8, 8, 8]);
    assert_eq!(first.n_words_with(5), first.message().len() + 4 + 5);
    for all in [&first, &second] {
        for (to, words) in all.ranges() {
            for (place, word) in want[to..].iter_mut().zip(words) {
                *place = *word as i32;
            }
        }
        let mut message = all.message();
        message.resize(1024, u32::MAX);
        let message: Vec<i32> = message.into_iter().map(|word| word as i32).collect();
        bed.stream.upload(&mut lease, edits, &i32s(&message)).unwrap();
        bed.stream.run(&mut lease, false, |q| q.launch(&launch)).unwrap();
    }
    let mut bytes = vec![0; 4 * N];
    bed.stream.download(&lease, words, &mut bytes).unwrap();
    assert_eq!(bytes, i32s(&want));
}

#[test]
fn launchers_of_a_training_step_refuse_what_their_kernels_cannot_do() {
    use refrain_graph::{Binary, Reduce};
    use refrain_kernels::{BufView, CrossEntropyArgs, MapArgs, MapOp, TypedReduceArgs};
    let bed = Bed::sim();
    let mut layout = MemoryLayout::new("refused");
    let (small, large) = (layout.device("small", 64), layout.device("large", 1 << 16));
    let memory = bed.plan(&layout);
    let (small, large) = (memory.buf(small), memory.buf(large));
    let view = |dtype, dims: &[usize]| BufView::dense(large, dtype, bed::shape(dims));
    let map = |inputs: &[BufView], y, dtype| {
        let (op, shape) = (MapOp::Binary(Binary::Add), bed::shape(&[4, 40]));
        let args = MapArgs { op, inputs, outputs: &[y], dtype, shape, step: "s" };
        bed.kernels.map(&args).unwrap_err().to_string()
    };
    let rows = view(DType::BF16, &[4, 40]);
    let layout = bed::contiguous(&[4, 8, 5]).permute(&[1, 0, 2]).unwrap();
    let reduce = |layout: refrain_tensor::Layout, axis, scratch| {
        let x = BufView { buf: large, dtype: DType::BF16, layout };
        let args = TypedReduceArgs { kind: Reduce::Sum, x, axis, y: large, scratch, step: "s" };
        bed.kernels.typed_reduce(&args, &mut Vec::new()).unwrap_err().to_string()
    };
    let loss = |logits, loss| {
        let (targets, scale) = (large, large);
        let args = CrossEntropyArgs { logits, targets, scale, loss, dx: large, step: "s" };
        bed.kernels.cross_entropy(&args).unwrap_err().to_string()
    };
    assert_eq!(
        [
            map(&[rows], large, DType::BF16),
            map(&[rows, view(DType::I32, &[40])], large, DType::BF16),
            map(&[rows, view(DType::BF16, &[3])], large, DType::BF16),
            map(&[rows, rows], small, DType::BF16),
            map(&[rows, view(DType::Q8_0, &[4, 40])], large, DType::BF16),
            reduce(layout, 2, large),
            reduce(bed::contiguous(&[300, 40]), 0, small),
            loss(view(DType::BF16, &[32, 8]), small),
            loss(view(DType::I32, &[4, 8]), large),
        ]
        .map(|message| message.split_once("]: ").map_or(message.clone(), |(_, why)| why.to_owned())),
        [
            "1 operands and 1 results, must be 2 and 1",
            "no kernel supports integers here",
            "[3] does not broadcast to [4, 40]",
            "y has 64 bytes, needs 320",
            "an operand is Q8_0, which no kernel reads",
            "strides of [5, 40, 1] along dimension 2; copy it first",
            "scratch has 64 bytes, needs 800",
            "loss has 64 bytes, needs 128",
            "logits is I32, must be F32, F16 or BF16 like the other operands",
        ]
    );
}

#[test]
fn a_launcher_refuses_what_its_kernel_cannot_do_and_names_op_dtype_and_shape() {
    let bed = Bed::sim();
    let mut layout = MemoryLayout::new("refused");
    let (small, large) = (layout.device("small", 64), layout.device("large", 1 << 20));
    let memory = bed.plan(&layout);
    let (small, large) = (memory.buf(small), memory.buf(large));
    let linear = |w_dtype, m, n, k, w, y| {
        let x = dense(large, &[m, k]);
        let parts = &[LinearPart { w, y, n }];
        let args = LinearArgs { x, w_dtype, parts, m, k, w_is_fixed: true, step: "s" };
        bed.kernels.linear(&args).unwrap_err().to_string()
    };
    let odd = large.slice(2, 1000).unwrap();
    let messages = [
        linear(DType::I32, 1, 2, 32, large, large),
        linear(DType::Q2_K, 1, 2, 32, large, large),
        linear(DType::IQ2_XS, 1, 4, 256, small, large),
        linear(DType::F16, 1, 2, 32, odd, large),
        linear(DType::F16, 0, 2, 32, large, large),
        linear(DType::F16, 1, 100, 32, large, small),
    ];
    assert_eq!(
        messages,
        [
            "linear x I32 x [m=1, n=2, k=32]: no kernel supports this weight dtype",
            "linear x Q2_K x [m=1, n=2, k=32]: k must be a multiple of the quantisation block, 256",
            "linear x IQ2_XS x [m=1, n=4, k=256]: w has 64 bytes, needs 296",
            "linear x F16 x [m=1, n=2, k=32]: w starts at byte 2, must be 16-byte aligned",
            "linear x F16 x [m=0, n=2, k=32]: m is 0, must be at least 1",
            "linear x F16 x [m=1, n=100, k=32]: y has 64 bytes, needs 400",
        ]
    );
    let gemm = |dtype, k| {
        let (plan, parts) = (GemmPlan::new(16, &[2], k, 132), &[LinearPart { w: large, y: large, n: 2 }]);
        let args = GemmArgs { x: large, dtype, parts, m: 16, k, plan, scratch: None, step: "s" };
        bed.kernels.gemm(&args, &mut Vec::new()).unwrap_err().to_string()
    };
    assert_eq!(
        [gemm(DType::F32, 64), gemm(DType::BF16, 60)],
        [
            "gemm x F32 x [m=16, n=2, k=64]: the tensor-core kernels take F16 and BF16",
            "gemm x BF16 x [m=16, n=2, k=60]: k must be a multiple of 8",
        ]
    );
    let strided = bed::contiguous(&[4, 8]).transpose().unwrap();
    let x = refrain_kernels::BufView { buf: large, dtype: DType::F32, layout: strided };
    let args = RmsNormArgs { x, w: large, y: large, n_rows: 8, n_cols: 4, eps: 0.0, step: "s" };
    let error = bed.kernels.rms_norm(&args).unwrap_err();
    assert!(matches!(error, KernelError::Unsupported { .. }));
    assert_eq!(error.to_string(), "rms_norm x F32 x [n_rows=8, n_cols=4]: x has strided rows; copy it first");
}

#[test]
fn a_wrong_case_fails() {
    let mut bed = Bed::sim();
    let mut wrong = cases::dense::norms().remove(1);
    wrong.roles[0] = Role::Out(vec![0.5; 7 * 33], Tol::Whole(1e-6));
    let error = wrong.run(&mut bed).unwrap_err();
    assert!(error.contains("buffer 0"), "{error}");
}
