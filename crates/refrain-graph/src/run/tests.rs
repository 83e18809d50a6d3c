use super::*;
use crate::control::ControlLayout;
use crate::graph::Input;
use crate::op::TensorType;
use refrain_tensor::{DType, Shape};

const N_ROWS: usize = 3;
const N_BIAS: usize = 4;
const N_BLOCKS: usize = 5;

/// Inputs of a decode step of three rows, as a model declares them; the third row is unused.
fn feedback() -> (Feedback, ControlLayout) {
    let input = |name: &str, dims: &[usize]| Input {
        name: name.into(),
        ty: TensorType { dtype: DType::I32, shape: Shape::new(dims).unwrap() },
    };
    let inputs = [
        input("tokens", &[N_ROWS]),
        input("positions", &[N_ROWS]),
        input("shared", &[7]),
        input("rng", &[N_ROWS, 4]),
        input("history", &[N_ROWS, 2]),
        input("bias_ids", &[N_ROWS, N_BIAS]),
        input("tables", &[N_ROWS, N_BLOCKS]),
        input("mask", &[N_ROWS, 2]),
    ];
    let layout = ControlLayout::new(&inputs, 32).unwrap();
    let field = |name: &str| Field::of(&layout, layout.find(name).unwrap());
    let feedback = Feedback {
        n_rows: N_ROWS,
        token: 0,
        logprob: 1,
        tokens: field("tokens"),
        positions: field("positions"),
        rng: field("rng"),
        history: field("history"),
        bias_ids: field("bias_ids"),
        tables: field("tables"),
        slots: None,
        top: None,
        mask: None,
        adapters: None,
        n_seqs: N_ROWS,
    };
    (feedback, layout)
}

fn limits(n_positions: usize, n_choices: usize) -> RowLimits {
    RowLimits { n_positions, n_choices, window: 2, ..RowLimits::default() }
}

fn put(control: &mut ControlBlock, field: Field, row: usize, values: &[i32]) {
    let words = control.words_mut();
    for (word, value) in words[field.row(N_ROWS, row).words()].iter_mut().zip(values) {
        *word = *value as u32;
    }
}

/// A run with rows at positions 10 and 20, and an unused one.
fn run(rows: Vec<Option<RowLimits>>) -> Run {
    let (feedback, layout) = feedback();
    let mut control = ControlBlock::new(&layout);
    for (row, position) in [10, 20, -1].into_iter().enumerate() {
        put(&mut control, feedback.positions, row, &[position]);
        put(&mut control, feedback.rng, row, &[5, 6, position + 1, 0]);
        put(&mut control, feedback.bias_ids, row, &[1, 2, 3, 4]);
        put(&mut control, feedback.tables, row, &[0, 1, -1, -1, -1]);
    }
    Run::new(feedback, control, rows)
}

fn values(run: &Run, field: Field, row: usize) -> Vec<i32> {
    field.row(N_ROWS, row).read(run.control()).collect()
}

#[test]
fn each_row_of_a_step_ends_by_its_own_rules_and_is_padding_from_then_on() {
    let ends = RowLimits { end: vec![7], ..limits(100, 100) };
    let mut run = run(vec![Some(ends), Some(limits(22, 100))]);
    let flags = |run: &mut Run| -> Vec<Option<(u32, StepFlags)>> {
        let step = run.take().unwrap();
        step.rows.iter().map(|row| row.map(|row| (row.token, row.flags))).collect()
    };
    let none = StepFlags::default();
    run.commit(&[6, 7, 8], &[-1.0; 3], Vec::new(), Ran::REPLAYED);
    // The end token of the first row does not end the second; the third row is unused.
    assert_eq!(flags(&mut run), [Some((6, none)), Some((7, none)), None]);
    run.commit(&[7, 9, 8], &[-1.0; 3], Vec::new(), Ran::REPLAYED);
    assert_eq!(flags(&mut run), [Some((7, StepFlags::ENDED)), Some((9, StepFlags::LENGTH)), None]);
    assert!(run.has_ended());
    run.commit(&[7, 9, 8], &[-1.0; 3], Vec::new(), Ran::REPLAYED);
    assert_eq!(flags(&mut run), [None, None, None]);
    let feedback = *run.feedback();
    assert_eq!(values(&run, feedback.positions, 0), [-1]);
    assert_eq!(values(&run, feedback.history, 1), [7, 9]);
    assert_eq!(values(&run, feedback.rng, 0), [5, 6, 13, 0]);
    assert_eq!((run.n_taken(), run.take()), (3, None));
}

#[test]
fn logits_that_are_not_finite_end_one_row_and_no_other() {
    let mut run = run(vec![Some(limits(100, 100)), Some(limits(100, 100))]);
    run.commit(&[1, 2, 3], &[f32::NAN, -0.5, -0.5], Vec::new(), Ran::REPLAYED);
    let step = run.take().unwrap();
    assert!(step.rows[0].unwrap().flags.has(StepFlags::NON_FINITE));
    assert!(!step.rows[1].unwrap().ended() && !run.has_ended());
}

#[test]
fn biases_lapse_at_their_choice_and_those_before_them_stay() {
    let lapsing = Some(LapsingBias { n_kept: 1, until: 13 });
    let mut run = run(vec![Some(RowLimits { lapsing, ..limits(100, 100) }), Some(limits(100, 100))]);
    let bias_ids = run.feedback().bias_ids;
    // The choice at position 12 still uses them.
    run.commit(&[1, 2, 3], &[-1.0; 3], Vec::new(), Ran::REPLAYED);
    assert_eq!(values(&run, bias_ids, 0), [1, 2, 3, 4]);
    run.commit(&[1, 2, 3], &[-1.0; 3], Vec::new(), Ran::REPLAYED);
    assert_eq!(values(&run, bias_ids, 0), [1, -1, -1, -1]);
    assert_eq!(values(&run, bias_ids, 1), [1, 2, 3, 4]);
}

fn mask_field(run: &Run) -> Field {
    let layout = run.control.layout();
    Field::of(layout, layout.find("mask").unwrap())
}

#[test]
fn a_row_that_joins_leaves_or_grows_changes_only_its_own_fields() {
    let mut run = run(vec![Some(limits(100, 100)), Some(limits(100, 100))]);
    let feedback = *run.feedback();
    assert!(run.take_edits().is_empty());
    run.set_table(1, &[0, 1, 8, 9]);
    let edits = run.take_edits();
    assert_eq!(edits.rows, Vec::<usize>::new());
    let table = feedback.tables.row(N_ROWS, 1);
    assert_eq!(edits.fields, [Field { offset: table.offset + 8, len: 2 }]);
    run.set_table(1, &[0, 1, 8, 9]);
    assert!(run.take_edits().is_empty());

    let fill = |control: &mut ControlBlock| -> Result<(), ()> {
        put(control, feedback.positions, 2, &[33]);
        Ok(())
    };
    run.set_row(2, limits(40, 3), fill).unwrap();
    let RunEdits { fields, rows } = run.take_edits();
    assert_eq!(rows, [2]);
    let all = [
        feedback.tokens,
        feedback.positions,
        feedback.rng,
        feedback.history,
        feedback.bias_ids,
        feedback.tables,
        mask_field(&run),
    ];
    assert_eq!(fields, all.map(|field| field.row(N_ROWS, 2)));
    assert_eq!(run.limits(2).unwrap().n_choices, 3);

    run.clear_row(0);
    let RunEdits { fields, rows } = run.take_edits();
    assert_eq!(rows, [0]);
    assert_eq!(fields, [feedback.tokens, feedback.positions].map(|field| field.row(N_ROWS, 0)));
    assert_eq!((run.limits(0), values(&run, feedback.positions, 0)), (None, vec![-1]));
    run.commit(&[1, 2, 3], &[-1.0; 3], Vec::new(), Ran::REPLAYED);
    assert_eq!(run.take().unwrap().rows.iter().map(Option::is_some).collect::<Vec<_>>(), [false, true, true]);
}

#[test]
fn a_held_row_changes_nothing_and_the_others_go_on() {
    let mut run = run(vec![Some(limits(100, 100)), Some(limits(100, 100))]);
    run.feedback.mask = Some(mask_field(&run));
    let feedback = *run.feedback();
    run.sent(2);
    assert!(run.awaits_masks() && run.may_supply());
    let before: Vec<Vec<i32>> =
        run.control.layout().row_fields(N_ROWS, 1).map(|f| f.read(run.control()).collect()).collect();
    let late = LateRows { masks: vec![(0, vec![5, 6])], held: vec![1] };
    run.supply(&late);
    assert!(!run.awaits_masks() && run.may_supply());
    run.commit(&[7, 8, 9], &[-1.0; 3], Vec::new(), Ran::REPLAYED);
    let rows = run.take().unwrap().rows;
    assert_eq!(rows.iter().map(|row| row.map(|row| row.token)).collect::<Vec<_>>(), [Some(7), None, None]);
    let after: Vec<Vec<i32>> =
        run.control.layout().row_fields(N_ROWS, 1).map(|f| f.read(run.control()).collect()).collect();
    assert_eq!(before, after);
    assert_eq!(values(&run, feedback.mask.unwrap(), 0), [5, 6]);
    assert!(run.awaits_masks());
    run.supply(&LateRows::default());
    assert!(!run.may_supply());
    run.commit(&[7, 8, 9], &[-1.0; 3], Vec::new(), Ran::REPLAYED);
    let positions = run.take().unwrap().rows.into_iter().flatten().map(|row| row.position);
    assert_eq!(positions.collect::<Vec<_>>(), [11, 20]);
}
