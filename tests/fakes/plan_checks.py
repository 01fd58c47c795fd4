"""What must hold of every plan, whatever the device."""

from jpaged.step_plan import StepPlan


def check_plan(plan: StepPlan) -> None:
    """Assert that nothing in a plan is written twice, as a device may write in any order."""
    targets = {
        "row copies": [row for _, row in plan.row_copies],
        "page table entries": [entry[:3] for entry in plan.new_pages],
        "host pages": [host_page for _, host_page in plan.swap_outs],
        "pages": [page for _, page in plan.swap_ins + plan.page_copies],
    }
    for name, written in targets.items():
        assert len(set(written)) == len(written), f"a plan writes {name} twice: {written}"
