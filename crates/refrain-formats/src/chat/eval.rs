//! Runs a parsed template.
//!
//! Everything that grows is charged to the [`Budget`]: a template cannot exhaust memory, recurse without end or run
//! for long, whatever it does.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use super::budget::{Budget, Charge};
use super::error::{Stop, StopKind};
use super::program::{
    BinaryOp, Body, Call, CallArg, CompareOp, Expr, ExprKind, ForLoop, Macro, Name, Stmt, StmtKind,
};
use super::value::{GlobalFunction, ListBuilder, LoopState, TextBuilder, Val};
use super::{clock, filters, methods, ops, predicates, python};

/// Memory of a scope, namespace or macro besides its variables' values.
const ENTRY_BYTES: usize = 128;
/// Items of a `range`, as in Jinja's sandbox.
const MAX_RANGE: i128 = 100_000;

/// Variables of a loop iteration, a macro call or a `with` block.
struct VariableScope {
    variables: Vec<(Name, Val)>,
    parent: Option<usize>,
    is_captured: bool, // a macro refers to it
    _charge: Charge,
}

struct Namespace {
    fields: Vec<(Name, Val)>,
    charge: Charge,
}

struct BoundMacro {
    source: Arc<Macro>,
    scope: usize,
    _charge: Charge,
}

/// Where a statement continues.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

/// Arguments of a call.
pub(super) struct CallArgs {
    positional: Vec<Val>,
    named: Vec<(Name, Val)>,
    _charges: Vec<Charge>,
}

impl CallArgs {
    /// Removes an argument by name or position.
    pub(super) fn take(&mut self, idx: usize, name: &str) -> Option<Val> {
        if let Some(at) = self.named.iter().position(|(known, _)| &**known == name) {
            return Some(self.named.swap_remove(at).1);
        }
        self.positional.get_mut(idx).map(std::mem::take)
    }

    /// Like [`CallArgs::take`], for an argument that must be there.
    pub(super) fn require(&mut self, idx: usize, name: &str) -> Result<Val, Stop> {
        self.take(idx, name).ok_or_else(|| Stop::failed(format!("the argument {name} is missing")))
    }

    /// An optional integer.
    pub(super) fn int(&mut self, idx: usize, name: &str) -> Result<Option<i128>, Stop> {
        match self.take(idx, name) {
            None | Some(Val::None | Val::Undefined) => Ok(None),
            Some(value) => value
                .as_int()
                .map(Some)
                .ok_or_else(|| Stop::failed(format!("{name} must be an integer, not a {}", value.kind()))),
        }
    }

    /// A required string.
    pub(super) fn text(&mut self, idx: usize, name: &str) -> Result<Val, Stop> {
        let value = self.require(idx, name)?;
        match value.as_str() {
            Some(_) => Ok(value),
            None => Err(Stop::failed(format!("{name} must be a string, not a {}", value.kind()))),
        }
    }

    pub(super) fn flag(&mut self, idx: usize, name: &str) -> bool {
        self.take(idx, name).is_some_and(|value| value.is_true())
    }

    pub(super) fn positional(&self) -> &[Val] {
        &self.positional
    }

    pub(super) fn named(&self) -> &[(Name, Val)] {
        &self.named
    }

    /// The same arguments for another call.
    pub(super) fn copy(&self, budget: &Budget) -> Result<CallArgs, Stop> {
        let n_bytes = size_of_val(self.positional.as_slice()) + size_of_val(self.named.as_slice());
        let charge = budget.charge(n_bytes)?;
        Ok(CallArgs {
            positional: self.positional.clone(),
            named: self.named.clone(),
            _charges: vec![charge],
        })
    }

    /// The arguments after the first `n`.
    pub(super) fn after(mut self, n: usize) -> CallArgs {
        self.positional.drain(..n.min(self.positional.len()));
        self
    }
}

pub(super) struct Interpreter<'b> {
    pub(super) budget: &'b Budget,
    now: SystemTime,
    scopes: Vec<VariableScope>,
    scope: usize,
    namespaces: Vec<Namespace>,
    macros: Vec<BoundMacro>,
    outputs: Vec<TextBuilder<'b>>, // the innermost capture last
    n_loops: usize,
}

impl<'b> Interpreter<'b> {
    /// An interpreter whose outermost scope holds `variables`.
    pub(super) fn new(
        budget: &'b Budget,
        now: SystemTime,
        variables: Vec<(Name, Val)>,
    ) -> Result<Self, Stop> {
        let outermost = VariableScope {
            variables,
            parent: None,
            is_captured: true,
            _charge: budget.charge(ENTRY_BYTES)?,
        };
        Ok(Self {
            budget,
            now,
            scopes: vec![outermost],
            scope: 0,
            namespaces: Vec::new(),
            macros: Vec::new(),
            outputs: vec![TextBuilder::new(budget)?],
            n_loops: 0,
        })
    }

    /// The text of a template.
    pub(super) fn render(mut self, template: &Body) -> Result<String, Stop> {
        self.run(template)?;
        Ok(self.outputs.pop().map(TextBuilder::into_string).unwrap_or_default())
    }

    fn out(&mut self) -> Result<&mut TextBuilder<'b>, Stop> {
        self.outputs.last_mut().ok_or_else(|| Stop::failed("no output"))
    }

    fn enter(&mut self, parent: usize) -> Result<(), Stop> {
        let charge = self.budget.charge(ENTRY_BYTES)?;
        self.scopes.push(VariableScope {
            variables: Vec::new(),
            parent: Some(parent),
            is_captured: false,
            _charge: charge,
        });
        self.scope = self.scopes.len() - 1;
        Ok(())
    }

    /// Returns to a scope. Scopes that a macro refers to stay until the end of the rendering.
    fn leave_to(&mut self, scope: usize) {
        while self.scopes.len() - 1 > scope && self.scopes.last().is_some_and(|scope| !scope.is_captured) {
            self.scopes.pop();
        }
        self.scope = scope;
    }

    /// Runs `work` in a scope of its own.
    fn scoped<T>(
        &mut self,
        parent: usize,
        work: impl FnOnce(&mut Self) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        let scope = self.scope;
        self.enter(parent)?;
        let result = work(self);
        self.leave_to(scope);
        result
    }

    fn capture_scopes(&mut self) {
        let mut next = Some(self.scope);
        while let Some(idx) = next.filter(|&idx| !self.scopes[idx].is_captured) {
            self.scopes[idx].is_captured = true;
            next = self.scopes[idx].parent;
        }
    }

    fn lookup(&self, name: &str) -> Val {
        let mut next = Some(self.scope);
        while let Some(idx) = next {
            let scope = &self.scopes[idx];
            if let Some((_, value)) = scope.variables.iter().find(|(known, _)| &**known == name) {
                return value.clone();
            }
            next = scope.parent;
        }
        match name {
            "range" => Val::Function(GlobalFunction::Range),
            "dict" => Val::Function(GlobalFunction::Dict),
            "namespace" => Val::Function(GlobalFunction::Namespace),
            "raise_exception" => Val::Function(GlobalFunction::RaiseException),
            "strftime_now" => Val::Function(GlobalFunction::StrftimeNow),
            _ => Val::Undefined,
        }
    }

    fn store(&mut self, name: &Name, value: Val) {
        let variables = &mut self.scopes[self.scope].variables;
        match variables.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = value,
            None => variables.push((name.clone(), value)),
        }
    }

    fn assign(&mut self, target: &Expr, value: Val) -> Result<(), Stop> {
        match &target.kind {
            ExprKind::Var(name) => self.store(name, value),
            ExprKind::List(targets) | ExprKind::Tuple(targets) => {
                let items = value.items(self.budget)?;
                if items.items.len() != targets.len() {
                    let (n, found) = (targets.len(), items.items.len());
                    return Err(Stop::failed(format!("cannot unpack {found} values into {n} names")));
                }
                for (target, item) in targets.iter().zip(&items.items) {
                    self.assign(target, item.clone())?;
                }
            }
            ExprKind::Attr(object, name) => match self.eval(object)? {
                Val::Namespace(idx) => self.set_field(idx, name, value)?,
                other => {
                    let reason = format!("can only assign to a namespace, not to a {}", other.kind());
                    return Err(Stop::failed(reason));
                }
            },
            _ => return Err(Stop::failed("cannot assign to this expression")),
        }
        Ok(())
    }

    fn set_field(&mut self, idx: usize, name: &Name, value: Val) -> Result<(), Stop> {
        let Namespace { fields, charge } = &mut self.namespaces[idx];
        self.budget.work(size_of_val(fields.as_slice()))?;
        match fields.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = value,
            None => {
                self.budget.grow(charge, ENTRY_BYTES)?;
                fields.push((name.clone(), value));
            }
        }
        Ok(())
    }

    fn run(&mut self, body: &Body) -> Result<Flow, Stop> {
        for stmt in body {
            let flow = self.exec(stmt).map_err(|stop| stop.at(stmt.line))?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn exec(&mut self, stmt: &Stmt) -> Result<Flow, Stop> {
        let budget = self.budget;
        budget.step()?;
        budget.deeper(|| self.exec_kind(stmt))
    }

    fn exec_kind(&mut self, stmt: &Stmt) -> Result<Flow, Stop> {
        match &stmt.kind {
            StmtKind::Raw(text) => self.out()?.push_str(text)?,
            StmtKind::Emit(expr) => {
                let (value, budget) = (self.eval(expr)?, self.budget);
                python::write_str(self.out()?, &value, budget)?;
            }
            StmtKind::For(source) => {
                let items = self.eval(&source.iter)?;
                self.for_loop(source, items)?;
            }
            StmtKind::If { test, yes, no } => {
                let body = if self.eval(test)?.is_true() { yes } else { no };
                return self.run(body);
            }
            StmtKind::With { assignments, body } => {
                return self.scoped(self.scope, |it| {
                    for (target, value) in assignments {
                        let value = it.eval(value)?;
                        it.assign(target, value)?;
                    }
                    it.run(body)
                });
            }
            StmtKind::Set { target, value } => {
                let value = self.eval(value)?;
                self.assign(target, value)?;
            }
            StmtKind::SetBlock { target, filter, body } => {
                let text = self.captured(body)?;
                let value = match filter {
                    Some(filter) => self.filter_chain(filter, text)?,
                    None => text,
                };
                self.assign(target, value)?;
            }
            StmtKind::FilterBlock { filter, body } => {
                let text = self.captured(body)?;
                let (value, budget) = (self.filter_chain(filter, text)?, self.budget);
                python::write_str(self.out()?, &value, budget)?;
            }
            StmtKind::Scope(body) => return self.scoped(self.scope, |it| it.run(body)),
            StmtKind::Macro(source) => {
                let bound = self.bind(source)?;
                self.store(&source.name, bound);
            }
            StmtKind::CallBlock { call, caller } => {
                let caller = self.bind(caller)?;
                let mut args = self.args(&call.args)?;
                args.named.push(("caller".into(), caller));
                let (value, budget) = (self.call_with(call, args)?, self.budget);
                python::write_str(self.out()?, &value, budget)?;
            }
            StmtKind::Do(call) => drop(self.call(call)?),
            StmtKind::Break => return Ok(Flow::Break),
            StmtKind::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn captured(&mut self, body: &Body) -> Result<Val, Stop> {
        self.outputs.push(TextBuilder::new(self.budget)?);
        let result = self.scoped(self.scope, |it| it.run(body));
        let text = self.outputs.pop().map(TextBuilder::finish).unwrap_or_default();
        result.map(|_| text)
    }

    fn for_loop(&mut self, source: &Arc<ForLoop>, over: Val) -> Result<(), Stop> {
        let mut items = over.items(self.budget)?;
        if let Some(filter) = &source.filter {
            let mut kept = ListBuilder::new(self.budget)?;
            for item in &items.items {
                let keep = self.scoped(self.scope, |it| {
                    it.assign(&source.target, item.clone())?;
                    it.eval(filter)
                })?;
                if keep.is_true() {
                    kept.push(item.clone())?;
                }
            }
            items = kept.finish()?.items(self.budget)?;
        }
        if items.items.is_empty() {
            self.scoped(self.scope, |it| it.run(&source.otherwise))?;
            return Ok(());
        }
        let state = Rc::new(LoopState {
            items: items.clone(),
            idx: Cell::new(0),
            nesting: if source.is_recursive { self.n_loops } else { 0 },
            source: source.clone(),
        });
        let name: Name = "loop".into();
        for (idx, item) in items.items.iter().enumerate() {
            self.budget.step()?;
            state.idx.set(idx);
            let flow = self.scoped(self.scope, |it| {
                it.store(&name, Val::Loop(state.clone()));
                it.assign(&source.target, item.clone())?;
                it.run(&source.body)
            })?;
            if flow == Flow::Break {
                break;
            }
        }
        Ok(())
    }

    fn bind(&mut self, source: &Arc<Macro>) -> Result<Val, Stop> {
        self.capture_scopes();
        let charge = self.budget.charge(ENTRY_BYTES)?;
        self.macros.push(BoundMacro { source: source.clone(), scope: self.scope, _charge: charge });
        Ok(Val::Macro(self.macros.len() - 1))
    }

    pub(super) fn eval(&mut self, expr: &Expr) -> Result<Val, Stop> {
        let budget = self.budget;
        budget.step().and_then(|()| budget.deeper(|| self.eval_kind(expr))).map_err(|stop| stop.at(expr.line))
    }

    fn eval_all(&mut self, exprs: &[Expr]) -> Result<Vec<Val>, Stop> {
        exprs.iter().map(|expr| self.eval(expr)).collect()
    }

    fn eval_kind(&mut self, expr: &Expr) -> Result<Val, Stop> {
        let budget = self.budget;
        match &expr.kind {
            ExprKind::None => Ok(Val::None),
            ExprKind::Bool(value) => Ok(Val::Bool(*value)),
            ExprKind::Int(value) => Ok(Val::Int(*value)),
            ExprKind::Float(value) => Ok(Val::Float(*value)),
            ExprKind::Str(text) => Ok(Val::Literal(text.clone())),
            ExprKind::Var(name) => Ok(self.lookup(name)),
            ExprKind::List(items) => Val::list(budget, self.eval_all(items)?),
            ExprKind::Tuple(items) => Val::tuple(budget, self.eval_all(items)?),
            ExprKind::Map(pairs) => {
                let pairs: Result<Vec<_>, Stop> =
                    pairs.iter().map(|(key, value)| Ok((self.eval(key)?, self.eval(value)?))).collect();
                Val::map(budget, pairs?)
            }
            ExprKind::Not(value) => Ok(Val::Bool(!self.eval(value)?.is_true())),
            ExprKind::Neg(value) => ops::negate(&self.eval(value)?),
            ExprKind::Binary(op, sides) => self.binary(*op, sides),
            ExprKind::Compare(first, others) => self.comparison(first, others),
            ExprKind::If { test, yes, no } => match (self.eval(test)?.is_true(), no) {
                (true, _) => self.eval(yes),
                (false, Some(no)) => self.eval(no),
                (false, None) => Ok(Val::Undefined),
            },
            ExprKind::Attr(object, name) => {
                let object = self.eval(object)?;
                self.attr(&object, name)
            }
            ExprKind::Item(parts) => {
                let (object, key) = (self.eval(&parts[0])?, self.eval(&parts[1])?);
                self.item(&object, &key)
            }
            ExprKind::Slice { value, bounds } => {
                let value = self.eval(value)?;
                let mut evaluated = [None; 3];
                for (slot, bound) in evaluated.iter_mut().zip(bounds.iter()) {
                    *slot = match bound.as_ref().map(|bound| self.eval(bound)).transpose()? {
                        None | Some(Val::None | Val::Undefined) => None,
                        Some(bound) => {
                            let no = || Stop::failed(format!("a {} is no slice index", bound.kind()));
                            Some(bound.as_int().ok_or_else(no)?)
                        }
                    };
                }
                ops::slice(&value, evaluated, budget)
            }
            ExprKind::Filter { name, value, args } => {
                let value = match value {
                    Some(value) => self.eval(value)?,
                    None => return Err(Stop::failed("a filter without a value")),
                };
                let args = self.args(args)?;
                filters::apply(self, name, value, args)
            }
            ExprKind::Test { name, value, args } => {
                let value = self.eval(value)?;
                let args = self.args(args)?;
                predicates::apply(self, name, &value, args).map(Val::Bool)
            }
            ExprKind::Call(call) => self.call(call),
        }
    }

    fn binary(&mut self, op: BinaryOp, sides: &[Expr; 2]) -> Result<Val, Stop> {
        let left = self.eval(&sides[0])?;
        match op {
            BinaryOp::ScAnd if !left.is_true() => return Ok(left),
            BinaryOp::ScOr if left.is_true() => return Ok(left),
            _ => {}
        }
        let right = self.eval(&sides[1])?;
        ops::binary(op, left, right, self.budget)
    }

    fn comparison(&mut self, first: &Expr, others: &[(CompareOp, Expr)]) -> Result<Val, Stop> {
        let mut left = self.eval(first)?;
        for (op, right) in others {
            let right = self.eval(right)?;
            if !ops::compare(*op, &left, &right, self.budget)? {
                return Ok(Val::Bool(false));
            }
            left = right;
        }
        Ok(Val::Bool(true))
    }

    /// Applies the filters of a `{% filter %}` or `{% set %}` block to its text.
    fn filter_chain(&mut self, filter: &Expr, text: Val) -> Result<Val, Stop> {
        let ExprKind::Filter { name, value, args } = &filter.kind else {
            return Err(Stop::failed("a block's filter is no filter"));
        };
        let budget = self.budget;
        let value = match value {
            Some(inner) => budget.deeper(|| self.filter_chain(inner, text))?,
            None => text,
        };
        let args = self.args(args)?;
        filters::apply(self, name, value, args)
    }

    fn args(&mut self, sources: &[CallArg]) -> Result<CallArgs, Stop> {
        let mut args = CallArgs { positional: Vec::new(), named: Vec::new(), _charges: Vec::new() };
        for source in sources {
            match source {
                CallArg::Positional(value) => args.positional.push(self.eval(value)?),
                CallArg::Named(name, value) => args.named.push((name.clone(), self.eval(value)?)),
                CallArg::List(values) => {
                    let values = self.eval(values)?.items(self.budget)?;
                    args._charges.push(self.budget.charge(size_of_val(values.items.as_slice()))?);
                    args.positional.extend_from_slice(&values.items);
                }
                CallArg::Map(values) => {
                    let Val::Map(values) = self.eval(values)? else {
                        return Err(Stop::failed("** needs a dictionary"));
                    };
                    args._charges.push(self.budget.charge(2 * size_of_val(values.entries.as_slice()))?);
                    for (key, value) in &values.entries {
                        let key = key.as_str().ok_or_else(|| Stop::failed("** needs names as keys"))?;
                        args._charges.push(self.budget.charge(key.len())?);
                        args.named.push((key.into(), value.clone()));
                    }
                }
            }
        }
        Ok(args)
    }

    fn call(&mut self, call: &Call) -> Result<Val, Stop> {
        let args = self.args(&call.args)?;
        self.call_with(call, args)
    }

    fn call_with(&mut self, call: &Call, args: CallArgs) -> Result<Val, Stop> {
        if let ExprKind::Attr(object, name) = &call.callee.kind {
            let object = self.eval(object)?;
            return match self.field(&object, name)? {
                Some(callee @ (Val::Macro(_) | Val::Function(_) | Val::Loop(_))) => {
                    self.call_value(&callee, args)
                }
                _ => methods::call(self, &object, name, args),
            };
        }
        let callee = self.eval(&call.callee)?;
        if let (Val::Undefined, ExprKind::Var(name)) = (&callee, &call.callee.kind) {
            return Err(Stop::failed(format!("unknown function: {name} is unknown")));
        }
        self.call_value(&callee, args)
    }

    fn call_value(&mut self, callee: &Val, args: CallArgs) -> Result<Val, Stop> {
        match callee {
            Val::Function(function) => self.call_function(*function, args),
            Val::Macro(idx) => self.call_macro(*idx, args),
            Val::Loop(state) => {
                if !state.source.is_recursive {
                    return Err(Stop::failed("this loop is not recursive"));
                }
                let [over] = args.positional() else {
                    return Err(Stop::failed("loop() takes one argument"));
                };
                self.outputs.push(TextBuilder::new(self.budget)?);
                self.n_loops += 1;
                let result = self.for_loop(&state.source.clone(), over.clone());
                self.n_loops -= 1;
                let text = self.outputs.pop().map(TextBuilder::finish).unwrap_or_default();
                result.map(|()| text)
            }
            other => Err(Stop::failed(format!("a {} cannot be called", other.kind()))),
        }
    }

    fn call_macro(&mut self, idx: usize, mut args: CallArgs) -> Result<Val, Stop> {
        let BoundMacro { source, scope, .. } = &self.macros[idx];
        let (source, scope) = (source.clone(), *scope);
        if args.positional.len() > source.params.len() {
            let (n, most) = (args.positional.len(), source.params.len());
            return Err(Stop::failed(format!("{} takes {most} arguments, got {n}", source.name)));
        }
        // Parameters are looked up by name.
        self.budget.work(args.named.len().saturating_mul(source.params.len()).saturating_mul(16))?;
        self.outputs.push(TextBuilder::new(self.budget)?);
        let result = self.scoped(scope, |it| {
            if let Some(caller) = args.take(usize::MAX, "caller") {
                it.store(&"caller".into(), caller);
            }
            for (idx, (name, default)) in source.params.iter().enumerate() {
                let value = match (args.take(idx, name), default) {
                    (Some(value), _) => value,
                    (None, Some(default)) => it.eval(default)?,
                    (None, None) => Val::Undefined,
                };
                it.store(name, value);
            }
            if let Some((name, _)) = args.named.first() {
                return Err(Stop::failed(format!("{} has no parameter {name}", source.name)));
            }
            it.run(&source.body)
        });
        let text = self.outputs.pop().map(TextBuilder::finish).unwrap_or_default();
        result.map(|_| text)
    }

    fn call_function(&mut self, function: GlobalFunction, mut args: CallArgs) -> Result<Val, Stop> {
        match function {
            GlobalFunction::Range => self.range(args),
            GlobalFunction::Dict => {
                let first = match args.take(0, "") {
                    Some(Val::Map(map)) => map.entries.clone(),
                    Some(other) => {
                        return Err(Stop::failed(format!("dict() cannot read a {}", other.kind())));
                    }
                    None => Vec::new(),
                };
                let named = args.named.into_iter().map(|(name, value)| (Val::Literal(name), value));
                Val::map(self.budget, first.into_iter().chain(named))
            }
            GlobalFunction::Namespace => {
                let mut fields = Vec::new();
                let mut charge = self.budget.charge(ENTRY_BYTES)?;
                if let Some(Val::Map(map)) = args.take(0, "") {
                    for (key, value) in &map.entries {
                        let key = key.as_str().ok_or_else(|| Stop::failed("a namespace needs names"))?;
                        self.budget.grow(&mut charge, ENTRY_BYTES + key.len())?;
                        fields.push((key.into(), value.clone()));
                    }
                }
                self.budget.grow(&mut charge, ENTRY_BYTES * args.named.len())?;
                fields.extend(args.named);
                self.namespaces.push(Namespace { fields, charge });
                Ok(Val::Namespace(self.namespaces.len() - 1))
            }
            GlobalFunction::RaiseException => {
                let reason = python::to_str(&args.require(0, "message")?, self.budget)?;
                Err(StopKind::Refused { reason: reason.as_str().unwrap_or_default().to_owned() }.into())
            }
            GlobalFunction::StrftimeNow => {
                let format = args.text(0, "format")?;
                let format = format.as_str().unwrap_or_default();
                // No code writes more than 32 bytes.
                let _charge = self.budget.charge(format.len().saturating_mul(16))?;
                Val::str(self.budget, &clock::strftime(self.now, format))
            }
        }
    }

    fn range(&mut self, mut args: CallArgs) -> Result<Val, Stop> {
        let first = args.int(0, "start")?.ok_or_else(|| Stop::failed("range() needs a number"))?;
        let (start, stop) = match args.int(1, "stop")? {
            Some(stop) => (first, stop),
            None => (0, first),
        };
        let step = args.int(2, "step")?.unwrap_or(1);
        if step == 0 {
            return Err(Stop::failed("range() with a step of 0"));
        }
        let too_large = || Stop::failed(format!("range() has more than {MAX_RANGE} items"));
        let span = stop.checked_sub(start).ok_or_else(too_large)?;
        let n = if span.signum() == step.signum() {
            span.unsigned_abs().div_ceil(step.unsigned_abs())
        } else {
            0
        };
        if n > MAX_RANGE.unsigned_abs() {
            return Err(too_large());
        }
        let mut items = ListBuilder::new(self.budget)?;
        for idx in 0..n as i128 {
            items.push(Val::Int(start + idx * step))?;
        }
        items.finish()
    }

    /// A field by name, if the value has it.
    fn field(&self, object: &Val, name: &str) -> Result<Option<Val>, Stop> {
        Ok(match object {
            Val::Undefined => {
                return Err(Stop::failed(format!("undefined value: it has no attribute {name}")));
            }
            Val::Map(map) => map.get_str(self.budget, name)?.cloned(),
            Val::Namespace(idx) => {
                let fields = &self.namespaces[*idx].fields;
                self.budget.work(size_of_val(fields.as_slice()))?;
                fields.iter().find(|(known, _)| &**known == name).map(|(_, value)| value.clone())
            }
            Val::Loop(state) => loop_field(state, name),
            _ => None,
        })
    }

    pub(super) fn attr(&self, object: &Val, name: &str) -> Result<Val, Stop> {
        Ok(self.field(object, name)?.unwrap_or_default())
    }

    pub(super) fn item(&self, object: &Val, key: &Val) -> Result<Val, Stop> {
        match (object, key.as_str()) {
            (Val::Map(map), _) => Ok(map.get(self.budget, key)?.cloned().unwrap_or_default()),
            (Val::Undefined | Val::Namespace(_) | Val::Loop(_), Some(name)) => self.attr(object, name),
            (Val::Undefined, None) => Err(Stop::failed("undefined value: it has no items")),
            _ => match key.as_int() {
                Some(idx) => ops::item(object, idx, self.budget),
                None => Ok(Val::Undefined),
            },
        }
    }
}

fn loop_field(state: &LoopState, name: &str) -> Option<Val> {
    let (idx, items) = (state.idx.get(), &state.items.items);
    let int = |value: usize| Val::Int(value as i128);
    Some(match name {
        "index" => int(idx + 1),
        "index0" => int(idx),
        "revindex" => int(items.len() - idx),
        "revindex0" => int(items.len() - idx - 1),
        "first" => Val::Bool(idx == 0),
        "last" => Val::Bool(idx + 1 == items.len()),
        "length" => int(items.len()),
        "depth" => int(state.nesting + 1),
        "depth0" => int(state.nesting),
        "previtem" => idx.checked_sub(1).map(|idx| items[idx].clone())?,
        "nextitem" => items.get(idx + 1)?.clone(),
        _ => return None,
    })
}
