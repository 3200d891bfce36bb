from autotune.cli import main

# A process that works for this one imports this module by another name.
if __name__ == "__main__":
    main()
